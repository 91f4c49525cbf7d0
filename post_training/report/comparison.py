"""comparison.html: compares two runs on one page, with both curves in each chart, differences and changed settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path
from typing import Any

from markupsafe import Markup

from post_training.estimates import Estimate, block_bootstrap
from post_training.masking import masked
from post_training.report import charts
from post_training.report.charts import Series
from post_training.report.metrics import REWARD, STEP_SECONDS, LoggedStep, ReportError, read_records
from post_training.report.run_folder import METRICS, at, read_configuration
from post_training.report.run_page import CURVES, REWARD_CURVES, Curves, environment, points

NAME = "comparison.html"
"""The file's name in the second run's folder."""

FEWEST_STEPS = 8
"""Smallest number of common steps for which a difference has an interval."""

_FIRST = (
    REWARD, "val-core/", "response_length/mean", "response_length/clip_ratio", "actor/grad_norm", STEP_SECONDS,
    "perf/throughput",
)  # fmt: skip
# Both runs train on the same prompts at the same step if these keys and the files are the same.
_ORDER_OF_DATA = ("data.seed", "data.shuffle", "data.train_batch_size", "data.gen_batch_size", "data.sampler")


@dataclass(frozen=True)
class Difference:
    """A metric in both runs, over the steps in which both have it.

    Attributes:
        steps: number of these steps.
        first, second: means of the two runs.
        difference: second minus first, with an interval if there are at least `FEWEST_STEPS` steps.
    """

    metric: str
    steps: int
    first: float
    second: float
    difference: Estimate

    @property
    def has_interval(self) -> bool:
        return self.steps >= FEWEST_STEPS

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.has_interval and (self.difference.low > 0 or self.difference.high < 0)


@dataclass(frozen=True)
class _Run:
    name: str
    config: Mapping[str, Any]
    records: Sequence[LoggedStep]


def write_comparison(first: Path, second: Path, path: Path | None = None) -> Path:
    """Write the comparison of two runs, by default to comparison.html in the folder of the second.

    Raises:
        ReportError: a folder is no run, or the runs have no common step; the message is one sentence.
        OSError: the page cannot be written.
    """
    target = path or second / NAME
    text = render_comparison(first, second)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(target)
    return target


def render_comparison(first: Path, second: Path) -> str:
    """Return the page as HTML. Raises ReportError as `write_comparison` does."""
    runs = [_read(folder, name) for folder, name in zip((first, second), _names(first, second), strict=True)]
    found = differences(runs[0].records, runs[1].records)
    if not found:
        raise ReportError(f"{first} and {second} have no metric at the same step. Pass two runs that overlap.")
    other = {run.name: dict(_flattened(masked(dict(run.config)))) for run in runs}
    keys = sorted(set().union(*other.values()))
    mine, theirs = other.values()
    absent = object()
    return (
        environment()
        .get_template("comparison.html")
        .render(
            names=[run.name for run in runs],
            steps=[len(run.records) for run in runs],
            same_prompts=_same_prompts(runs[0].config, runs[1].config),
            shown=[each for name in _FIRST for each in found if each.metric.startswith(name)],
            every=found,
            fewest=FEWEST_STEPS,
            panels=[(curves.title, curves.note, _chart(runs, curves)) for curves in (REWARD_CURVES, *CURVES)],
            settings=[
                (key, mine.get(key, "-"), theirs.get(key, "-"))
                for key in keys
                if mine.get(key, absent) != theirs.get(key, absent)
            ],
        )
    )


def differences(first: Sequence[LoggedStep], second: Sequence[LoggedStep]) -> list[Difference]:
    """Compare every metric that both runs have at the same step, in order of names."""
    found = []
    in_first, in_second = ({name for record in records for name in record.metrics} for records in (first, second))
    for name in sorted(in_first & in_second):
        mine, theirs = dict(points(first, name)), dict(points(second, name))
        if common := sorted(mine.keys() & theirs.keys()):
            pairs = [(mine[step], theirs[step]) for step in common]
            found.append(
                Difference(
                    name,
                    len(common),
                    sum(each for each, _ in pairs) / len(pairs),
                    sum(each for _, each in pairs) / len(pairs),
                    block_bootstrap([theirs - mine for mine, theirs in pairs]),
                )
            )
    return found


def _read(folder: Path, name: str) -> _Run:
    return _Run(name, read_configuration(folder), read_records(folder / METRICS))


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Return the folders' names, with their parents' names if they are the same."""
    left, right = first.resolve(), second.resolve()
    if left == right:
        raise ReportError(f"{first} and {second} are the same run. Pass two.")
    depth = 1
    while left.parts[-depth:] == right.parts[-depth:]:
        depth += 1
    return "/".join(left.parts[-depth:]), "/".join(right.parts[-depth:])


def _same_prompts(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether the same step of both runs has the same prompts.

    Files are compared by content, as a rehearsal keeps a copy of its data in its own folder.
    """
    files = []
    for config in (first, second):
        given = at(config, "data.train_files")
        files.append([Path(str(each)) for each in (given if isinstance(given, list) else [given])])
    try:
        same = all(mine == theirs or cmp(mine, theirs, shallow=False) for mine, theirs in zip(*files, strict=True))
    except (OSError, ValueError):  # files on another machine, or different numbers of files
        return False
    return same and all(at(first, key) == at(second, key) for key in _ORDER_OF_DATA)


def _chart(runs: Sequence[_Run], curves: Curves) -> Markup:
    series = [
        Series(f"{label}, {run.name}" if label else run.name, found)
        for name, label in curves.metrics.items()
        for run in runs
        if (found := points(run.records, name))
    ]
    return charts.lines(series, curves.text, curves.logarithmic, curves.zero)


def _flattened(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(config, Mapping) and config:
        for key, value in config.items():
            yield from _flattened(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, "null" if config is None else str(config)
