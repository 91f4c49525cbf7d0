"""Compares the files of two runs of one training: which metrics of which steps differ, and whether the weights do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEASURED = ("timing", "perf/", "actor/perf/", "memory/", "residency/")
"""Beginnings of metrics that a clock or the history of a process's memory decides."""


@dataclass(frozen=True)
class Comparison:
    """The differences between two runs.

    Attributes:
        steps: number of steps that were compared.
        metrics: number of values that were compared.
        differing: names of the values that differ, such as `step 3: actor/lr`, and a sentence for the saved state.
    """

    steps: int
    metrics: int
    differing: tuple[str, ...]


def compare(unbroken: Path, resumed: Path, last: int) -> Comparison:
    """Compare every metric of every step, and the digests of all files of the last checkpoint.

    Args:
        unbroken: folder of one run.
        resumed: folder of the other.
        last: the last step of the runs.
    """
    steps, count, differing = compare_metrics(unbroken, resumed)
    if digests_of(unbroken, last) != digests_of(resumed, last):
        differing.append("weights, optimizer or random numbers after the last step")
    return Comparison(steps, count, tuple(differing))


def are_same(name: str, ours: Any, theirs: Any) -> bool:
    """Whether two runs have the same value of a metric."""
    return bool(ours == theirs)


def compare_metrics(
    unbroken: Path, resumed: Path, agree: Callable[[str, Any, Any], bool] = are_same
) -> tuple[int, int, list[str]]:
    """Compare all metrics of two runs but `MEASURED`.

    Args:
        unbroken: the folder of one run.
        resumed: the folder of the other.
        agree: whether a metric's two values count as equal, by its name; None stands for a missing value.

    Returns:
        How many steps and values were compared, and which differ.
    """
    expected, found = metrics_of(unbroken), metrics_of(resumed)
    differing: list[str] = []
    count = 0
    for step in sorted(expected.keys() | found.keys()):
        ours, theirs = found.get(step), expected.get(step)
        if ours is None or theirs is None:
            differing.append(f"step {step} is only in one run")
            continue
        names = [name for name in sorted(ours.keys() | theirs.keys()) if not name.startswith(MEASURED)]
        count += len(names)
        differing += [f"step {step}: {name}" for name in names if not agree(name, ours.get(name), theirs.get(name))]
    return len(expected), count, differing


def metrics_of(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step of a run; a step that is recorded twice is an error."""
    found: dict[int, dict[str, Any]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["step"] in found:
            raise ValueError(f"{folder / 'metrics.jsonl'} has step {record['step']} twice")
        found[record["step"]] = record["metrics"]
    return found


def digests_of(folder: Path, step: int) -> dict[str, str]:
    """Return SHA-256 of the ranks' files after a step: weights, optimizer and states of random numbers."""
    step_folder = folder / "checkpoints" / f"global_step_{step}"
    found: dict[str, str] = {}
    for model in ("actor", *(["critic"] if (step_folder / "critic").is_dir() else [])):
        files = json.loads((step_folder / model / "manifest.json").read_text())["files"].items()
        found |= {f"{model}/{name}": entry["sha256"] for name, entry in files}
    return found
