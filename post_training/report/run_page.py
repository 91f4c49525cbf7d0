"""report.html: all information in a run's folder on one page, which needs neither a server nor a network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
from markupsafe import Markup

from post_training.masking import masked
from post_training.report import charts, palette
from post_training.report.charts import Series
from post_training.report.meters import read_meters
from post_training.report.metrics import (
    ALLOCATED_BYTES_PREFIX,
    BEGAN,
    COLLECTIVES_PREFIX,
    ENDED,
    MEMORY,
    PEAK_BYTES_PREFIX,
    PHASES,
    REWARD,
    SPREAD_OVER_OTHERS,
    STAGES,
    STEP_SECONDS,
    LoggedStep,
    ReportError,
    read_entries,
    read_events,
    read_objects,
    read_records,
)
from post_training.report.nodes import nodes_by_step
from post_training.report.palette import STAGE_COLOURS
from post_training.report.run_folder import CONFIGURATION, METERS, METRICS, at, read_configuration
from post_training.report.samples import read_samples
from post_training.report.summary import REWARD_WINDOW, RunFacts, moving_means, summarise

NAME = "report.html"
"""The file's name in the run's folder."""

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Panel:
    """A chart with its title and a sentence about its contents, or about why there is no chart."""

    title: str
    note: str
    chart: Markup


@dataclass(frozen=True)
class Curves:
    """The metrics of a panel, by name with their labels; a * in a name matches several metrics."""

    title: str
    note: str
    metrics: Mapping[str, str]
    text: Callable[[float], str] = charts.number
    logarithmic: bool = False
    zero: bool = False


REWARD_CURVES = Curves("Reward", "Mean over the responses of a step.", {REWARD: ""}, zero=True)
CURVES = (
    Curves(
        "Response lengths",
        "Tokens of a response; a flat line at the limit means that most are truncated.",
        {
            "response_length/mean": "mean",
            "response_length/max": "longest",
            "response_length/min": "shortest",
            "prompt_length/mean": "prompt, mean",
        },
        zero=True,
    ),
    Curves(
        "Truncated responses",
        "Share of responses that were truncated at the maximum length.",
        {"response_length/clip_ratio": "share"},
        zero=True,
    ),
    Curves(
        "KL",
        "Distance to the reference policy (loss), and between the policy before and after an update (ppo_kl).",
        {"actor/kl_loss": "loss", "actor/ppo_kl": "ppo_kl", "critic/kl": "in the reward"},
    ),
    Curves(
        "Entropy",
        "Of the next token, mean over the responses. It is measured with old_log_prob, which on-policy runs skip.",
        {"actor/entropy_loss": "entropy", "actor/entropy": "entropy of the update"},
    ),
    Curves(
        "Rollout and training log-probs",
        "|difference| for the same tokens. In float32 the largest stays below 1e-3; in bfloat16 a near tie between "
        "experts can go either way.",
        {"training/rollout_logprob_diff_max": "largest", "training/rollout_logprob_diff_mean": "mean"},
        logarithmic=True,
    ),
    Curves(
        "Experts of rollout and training",
        "Share of the compared tokens x layers that the two send to different sets of experts. In float32 none, "
        "except near tied scores; in bfloat16 those with nearly tied scores.",
        {"rollout/expert_sets_differ": "different", "rollout/expert_ties_differ": "behind a tie"},
        zero=True,
    ),
    Curves("Gradient norm", "Before clipping.", {"actor/grad_norm": "norm"}, zero=True),
    Curves("Policy loss", "Of the update.", {"actor/pg_loss": "loss"}),
    Curves("Learning rate", "Of the update.", {"actor/lr": "rate"}, zero=True),
    Curves(
        "Tokens a second",
        "Prompts and responses of a step, per die; steps that save or validate are slower.",
        {"perf/throughput": "tokens"},
        zero=True,
    ),
    Curves(
        "Memory by phase",
        "Peak of the fullest die.",
        {PEAK_BYTES_PREFIX + phase: phase for phase in PHASES},
        charts.size,
        zero=True,
    ),
    Curves(
        "Bytes of the overlay's collectives",
        "Per step, of the rank that sent most.",
        {f"{COLLECTIVES_PREFIX}*/bytes": ""},
        charts.size,
        zero=True,
    ),
)


def write_page(folder: Path, path: Path | None = None) -> Path:
    """Write the report of the run in `folder`, by default to its report.html, replacing an earlier one atomically.

    Raises:
        ReportError: it is no run, or one of its files cannot be read; the message is one sentence.
    """
    target = path or folder / NAME
    text = render_page(folder)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(target)
    return target


def missing_part(folder: Path) -> str:
    """Return why the run in `folder` has no page yet; empty once there is a step.

    A run that ended before its first step has a page that shows why.

    Raises:
        ReportError: a file of the run cannot be read.
    """
    if not folder.is_dir():
        return "the folder does not exist yet"
    if not (folder / CONFIGURATION).is_file():
        return f"the folder has no {CONFIGURATION} yet"
    records = read_records(folder / METRICS)
    begun = not records and _state(folder, read_events(folder), records).goes_on
    return "the first step has not ended yet" if begun else ""


def render_page(folder: Path, live: bool = False) -> str:
    """Return the page as HTML. A `live` page polls its server for a newer one while the run goes on.

    Raises:
        ReportError: see `write_page`.
    """
    try:
        return _render(folder, live)
    except ReportError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, TemplateError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ReportError(f"{folder} has a file that a run does not write in this form ({reason}).") from error


def _render(folder: Path, live: bool) -> str:
    config = read_configuration(folder)
    records = read_records(folder / METRICS)
    faults = read_entries(folder / "faults.jsonl", kind=str, message=str)
    state = _state(folder, read_events(folder), records)
    meters = read_meters(folder / METERS)
    facts = RunFacts(
        seed=at(config, "data.seed") or 0,
        dies=(at(config, "trainer.n_gpus_per_node") or 0) * (at(config, "trainer.nnodes") or 1),
        wall_s=state.seconds,
        precision=at(config, "actor_rollout_ref.overlay.precision") or "",
    )
    overlay = next(iter(read_objects([folder / "overlay.json"])), None)
    summary = summarise(records, facts, overlay, meters, faults, state.message or None)
    return (
        environment()
        .get_template("run.html")
        .render(
            live=live and state.goes_on,
            name=at(config, "monitoring_config.dashboard") or folder.resolve().name,
            state=state,
            model=at(config, "actor_rollout_ref.model.path"),
            planned=at(config, "trainer.total_training_steps"),
            emulated=meters is not None,
            summary=summary,
            panels=[_rewards(records), _stages(records), *(_curves(records, curves) for curves in CURVES)],
            collectives=_collectives(summary["collectives"]),
            memory=_memory(folder),
            samples=read_samples(folder),
            faults=faults,
            alerts=read_entries(folder / "alerts.jsonl", time=float, alert=str, message=str),
            unknown="after step 1" if state.goes_on and not records else "not measured",
            stretches=nodes_by_step(folder, max((record.step for record in records), default=0)),
            metrics=_table(records),
            config=yaml.safe_dump(masked(dict(config)), sort_keys=False, allow_unicode=True),
            made=_time(time.time()),
        )
    )


def environment() -> Environment:
    """Return the environment of the pages' templates; it escapes all values, including text that a model wrote."""
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"light": palette.LIGHT, "dark": palette.DARK}
    made.globals |= {"light_frame": palette.LIGHT_FRAME, "dark_frame": palette.DARK_FRAME}
    made.filters |= {"number": charts.number, "size": charts.size}
    return made


@dataclass(frozen=True)
class _State:
    """The state of a run.

    Attributes:
        status: going on, finished, failed or killed.
        message: why it ended.
        seconds: from its last start to its last event or step.
        last: time of its last event or step.
    """

    status: str
    message: str
    seconds: float
    last: str

    @property
    def goes_on(self) -> bool:
        return self.status == "going on"


def _state(folder: Path, events: Sequence[Mapping[str, Any]], records: Sequence[LoggedStep]) -> _State:
    """Determine the state from the last start's events, and from its launcher's result in summary.json.

    A run that was killed with SIGKILL has neither and seems to go on.
    """
    begin = max((index for index, event in enumerate(events) if event["event"] == BEGAN), default=0)
    latest = events[begin:]
    times = [event["time"] for event in latest] + [record.time for record in records]
    seconds = max(times) - latest[0]["time"] if latest else 0.0
    last = _time(max(times)) if times else "nothing yet"
    judged = folder / "summary.json"
    if judged.exists() and not (latest and judged.stat().st_mtime < latest[0]["time"]):
        failure = next(iter(read_objects([judged])), {}).get("failure")
        return _State("failed" if failure else "finished", failure or "", seconds, last)
    end = next((event for event in latest if event["event"] == ENDED), None)
    if end is None:
        return _State("going on", "", seconds, last)
    return _State(end["status"], end["message"], seconds, last)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def points(records: Sequence[LoggedStep], name: str) -> list[tuple[int, float]]:
    """Return the finite values of a metric with their steps."""
    found = ((record.step, record.metrics.get(name)) for record in records)
    return [(step, float(value)) for step, value in found if isinstance(value, int | float)]


def _rewards(records: Sequence[LoggedStep]) -> Panel:
    rewards = points(records, REWARD)
    means = moving_means([value for _, value in rewards], REWARD_WINDOW)
    smooth = [(step, mean) for (step, _), mean in zip(rewards, means, strict=True)]
    series = [Series("step", rewards, dots=True), Series(f"mean of {REWARD_WINDOW} steps", smooth)]
    validated = sorted(
        {name for record in records for name in record.metrics if name.startswith(("val-core/", "val/"))}
    )
    series += [Series(name, points(records, name)) for name in validated]
    return Panel(REWARD_CURVES.title, REWARD_CURVES.note, charts.lines(series, zero=True))


def _stages(records: Sequence[LoggedStep]) -> Panel:
    timed = [record for record in records if record.metrics.get(STEP_SECONDS) is not None]
    seconds = [record.stage_seconds() for record in timed]
    parts = [(name, [each[name] or 0.0 for each in seconds]) for name in STAGES if name != SPREAD_OVER_OTHERS]
    used = [sum(values) for values in zip(*(values for _, values in parts), strict=True)]
    totals = [record.metrics[STEP_SECONDS] or 0.0 for record in timed]
    parts.append(("other", [max(0.0, total - part) for total, part in zip(totals, used, strict=True)]))
    shown = [(name, values) for name, values in parts if any(values)]
    note = "Seconds of a step by stage. The stages include the time to move tensors to and from the host."
    return Panel(
        "Seconds by stage", note, charts.stacked([record.step for record in timed], shown, colours=STAGE_COLOURS)
    )


def _curves(records: Sequence[LoggedStep], curves: Curves) -> Panel:
    names = {name for record in records for name in record.metrics}
    series = []
    for wanted, label in curves.metrics.items():
        begin, star, end = wanted.partition("*")
        for name in sorted(names) if star else [wanted]:
            if name.startswith(begin) and name.endswith(end) and (found := points(records, name)):
                series.append(Series(label or name.removeprefix(begin).removesuffix(end), found))
    chart = charts.lines(series, curves.text, curves.logarithmic, curves.zero)
    return Panel(curves.title, curves.note, chart)


def _collectives(counted: Mapping[str, Mapping[str, int]] | None) -> Markup:
    values = [(kind, float(each["bytes"])) for kind, each in (counted or {}).items() if "bytes" in each]
    return charts.bars(sorted(values, key=lambda pair: -pair[1]), charts.size)


def _memory(folder: Path) -> dict[str, Any]:
    """Return the peak bytes of each die by phase: the phases, and a row for each die with its values."""
    files = sorted((folder / MEMORY).glob("*.json"))
    dies = read_objects(files)
    for file, die in zip(files, dies, strict=True):
        peaks = die.get("peak_bytes")
        if (
            not isinstance(die.get("rank"), int)
            or not isinstance(peaks, dict)
            or not all(map(_is_size, peaks.values()))
        ):
            raise ReportError(f"{file} needs a rank and its peak_bytes. Correct or remove it.")
    dies.sort(key=lambda die: die["rank"])
    phases = [phase for phase in PHASES if any(phase in die["peak_bytes"] for die in dies)]
    rows = [(die["rank"], [die["peak_bytes"].get(phase) for phase in phases]) for die in dies]
    return {"phases": phases, "rows": rows}


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _table(records: Sequence[LoggedStep]) -> list[tuple[str, list[str]]]:
    """Return for every metric its first, last, lowest and highest value, and in how many steps it was not finite."""
    rows = []
    for name in sorted({name for record in records for name in record.metrics}):
        values = [value for _, value in points(records, name)]
        text = charts.size if name.startswith((PEAK_BYTES_PREFIX, ALLOCATED_BYTES_PREFIX)) else charts.number
        cells = [text(each) for each in (values[0], values[-1], min(values), max(values))] if values else ["-"] * 4
        unknown = sum(name in record.metrics and record.metrics[name] is None for record in records)
        rows.append((name, [*cells, str(unknown or "")]))
    return rows
