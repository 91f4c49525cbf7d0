"""The output of a running rehearsal: one line per event, one row per step, and in a terminal a status line below.

Rows never change once printed, so a CI log without a terminal reads like a terminal does.
"""

import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from post_training.report import LoggedStep, read_records
from post_training.report.metrics import ENDED, REWARD, STEP_SECONDS, read_entries, training_steps
from post_training.terminal import escaped
from verl_patches.features.measure.run_files import read_faults

# Width of a log without a terminal: enough for every row, so that none is broken.
_LOG_WIDTH = 120
# A row fits into the narrowest usual terminal.
_ROW_WIDTH = 79
_BAR_CELLS = 8
_CELL = 8
_STAGES = ("rollout", "old_log_prob", "ref", "update", "reshard", "offload")
_COLUMNS = ("rollout", "old lp", "ref", "update", "reshard", "offload", "step s")
_HEADER = f"{'step':>7}  {'reward':<{6 + _BAR_CELLS}}" + "".join(f"{title:>{_CELL}}" for title in _COLUMNS)
_PRECISION_NOTES = {
    "bfloat16": " (rounding in bfloat16; the gate is for float32: run with -- "
    "actor_rollout_ref.overlay.precision=float32)",
}
_EVENTS = {
    "ray_ready": "Ray is up",
    "data_ready": "data are read",
    "reference_ready": "the reference model is built",
    "rollout_ready": "the trained model and the rollout engines are built",
    "models_ready": "all models are ready",
    "training_begins": "training begins",
}


def make_console() -> Console:
    """Returns the console for standard output; without a terminal it prints plain, unbroken lines.

    Brackets are no markup: paths and lines of logs have them.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    return console


def emulated_dies(count: int) -> str:
    """Return a number of emulated dies in words."""
    return "1 emulated die" if count == 1 else f"{count} emulated dies"


class Progress:
    """Follows the files that a run writes and prints news from them; times count from ``launched`` (Unix)."""

    def __init__(self, console: Console, output: Path, steps: int, launched: float) -> None:
        self.console = console
        self.steps = steps
        self.records: list[LoggedStep] = []
        self._metrics = output / "metrics.jsonl"
        self._events_file = output / "events.jsonl"
        self._events_shown = 0
        self._output = output
        self._faults_shown = 0
        self._started = launched
        self._status = console.status("starting") if console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self) -> None:
        """Prints the events, steps and faults that are new since the last call."""
        events = self._events()
        for event in events[self._events_shown :]:
            title = _EVENTS.get(event["event"], event["event"])
            self.console.print(f"  {event['time'] - self._started:6.1f} s  {title}")
        self._events_shown = len(events)
        records = training_steps(read_records(self._metrics))
        for record in records[len(self.records) :]:
            if not self.records:
                self.console.print(Text(f"\n{_HEADER}", style="bold"))
            self.records.append(record)
            self.console.print(format_row(record, self.steps, self.console.encoding))
        faults = read_faults(self._output)
        for fault in faults[self._faults_shown :]:
            if not fault.get("ended"):  # else the error that follows says it
                self.console.print(Text(f"  warning: {escaped(fault['message'])}", style="yellow"))
        self._faults_shown = len(faults)
        if self._status is not None:
            self._status.update(self._status_text())

    def startup_seconds(self) -> float | None:
        """Return seconds from the launch to the start of the first step; None before the first step has ended."""
        first = next((record for record in self.records if record.time >= self._started), None)
        if first is None:
            return None
        return first.time - (first.metrics.get(STEP_SECONDS) or 0.0) - self._started

    def event_seconds(self) -> dict[str, float]:
        """Return seconds from the launch to each event of the start-up."""
        return {event["event"]: event["time"] - self._started for event in self._events()}

    def _events(self) -> list[dict[str, Any]]:
        """Return the events of this launch; the file of a resumed run also holds those of earlier launches."""
        events = (event for event in read_entries(self._events_file) if event["event"] != ENDED)
        return [event for event in events if event["time"] >= self._started]

    def _status_text(self) -> str:
        elapsed = format_duration(time.time() - self._started)
        if not self.records:
            return f"starting up, {elapsed}"
        left = self.steps - len(self.records)
        if left <= 0:
            return f"stopping, {elapsed}"
        spent = [record.metrics.get(STEP_SECONDS) or 0.0 for record in self.records[1:] or self.records]
        remaining = format_duration(left * sum(spent) / len(spent))
        return f"step {len(self.records) + 1} of {self.steps}, {elapsed}, about {remaining} left"


def format_row(record: LoggedStep, steps: int, encoding: str = "utf-8") -> str:
    """Returns one row of the step table: step, reward with a bar, seconds of each stage and of the step."""
    reward = record.metrics.get(REWARD)
    seconds: Mapping[str, float | None] = {**record.stage_seconds(), "step s": record.metrics.get(STEP_SECONDS)}
    cells = [_number(seconds[stage], _CELL) for stage in (*_STAGES, "step s")]
    bar = _bar(reward or 0.0, encoding)
    return f"{f'{record.step}/{steps}':>7}  {_number(reward, 5, 3)} {bar}" + "".join(cells)


def _bar(share: float, encoding: str) -> str:
    full, empty = ("█", "░") if encoding.lower().startswith("utf") else ("#", ".")
    cells = round(min(1.0, max(0.0, share)) * _BAR_CELLS)
    return full * cells + empty * (_BAR_CELLS - cells)


def _number(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def format_duration(seconds: float) -> str:
    """Returns minutes and seconds, as in ``2:05``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _step_seconds(summary: Mapping[str, Any]) -> str:
    """Return the seconds of a whole step, and those without saving and validation if the two differ."""
    whole, training = (_shown(summary[name], ".2f") for name in ("step_seconds", "step_seconds_training"))
    return whole if whole == training else f"{whole}, {training} without saving and validation"


def peaks_in_words(summary: Mapping[str, Any]) -> str:
    """Return the peak device memory of each phase of a step."""
    peaks = summary["peak_device_bytes"] or {}
    return ", ".join(f"{phase} {size / 2**20:.0f} MiB" for phase, size in peaks.items()) or "not measured"


def print_summary(console: Console, summary: Mapping[str, Any], output: Path) -> None:
    """Prints the end of a successful run."""
    stages = {name: value for name, value in summary["stage_seconds"].items() if value is not None}
    exact = {True: "equal bit for bit after every step", False: "NOT EQUAL", None: "not compared in this run"}
    rows = {
        "reward": f"{_shown(summary['reward_first'], '.3f')} -> {_shown(summary['reward_last'], '.3f')} (means of the "
        "first and the last 5 steps)",
        "seconds a step": f"{_step_seconds(summary)}: "
        + ", ".join(f"{name} {value:.2f}" for name, value in stages.items()),
        "start-up": f"{_shown(summary['startup_s'], '.1f')} s from the command to the first step",
        "weights": exact[summary["weights_exact"]],
        "log-probs": f"rollout and training differ by at most {_shown(summary['rollout_logprob_diff_max'], '.2e')}"
        + _PRECISION_NOTES.get(summary["precision"], ""),
        "experts": _experts_in_words(summary["expert_sets_differ"], summary["expert_sets_compared"]),
        "patches": f"{_shown(summary['patches_applied'], 'd')} applied, {_shown(summary['patches_effective'], 'd')} "
        "effective",
        "device peak": peaks_in_words(summary),
        "report": str(output / "report.html"),
        "files": str(output),
    }
    if summary["ray_ended"]:
        rows = {"fault": summary["ray_ended"], **rows}
    title = f"{summary['steps']} steps on {emulated_dies(summary['dies'])}, seed {summary['seed']}"
    console.print(Text(f"\nDone in {format_duration(summary['wall_s'])}: {title}", style="bold"))
    print_rows(console, rows)


def print_rows(console: Console, rows: Mapping[str, str]) -> None:
    """Print the lines of a summary, each a name and its value."""
    for name, value in rows.items():
        console.print(_wrapped(name, value))


def _experts_in_words(share: float | None, compared: int | None) -> str:
    """Return how often rollout and training chose different experts for a token; a dense model has no experts."""
    if share is None:
        return "not compared in this run"
    if not share:
        return f"the same in rollout and training, in all {compared:,} tokens x layers compared"
    return f"rollout and training chose different experts for at most {share:.2%} of a step's tokens x layers"


def _wrapped(name: str, value: str) -> str:
    """Return a line of the summary, wrapped below its value if it is longer than a row of the step table."""
    return textwrap.fill(
        escaped(value), _ROW_WIDTH, initial_indent=f"  {name:<15} ", subsequent_indent=" " * 18, break_long_words=False
    )


def _shown(value: float | None, form: str) -> str:
    return "not measured" if value is None else format(value, form)
