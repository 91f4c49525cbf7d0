"""The recipe's own table for runs, beside the rows that it published."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from post_training.report.flops import DIES_OF_A_CARD, UnknownModelError, utilisation
from post_training.report.published import CARDS, DEEPSEEK_V3, PublishedRow
from post_training.report.rates import COLUMNS, Rates, StepStatistics, rates
from post_training.report.run_folder import Run

_SECONDS = {name: name for name in COLUMNS} | {"rest": "offload etc."}
_LABEL_WIDTH, _NOTE_WIDTH = 30, 110


@dataclass(frozen=True)
class Column:
    """A column of the table: a run or a published row. `mfu` is that of the update, between 0 and 1."""

    name: str
    steps: str
    statistics: StepStatistics
    per_card: Rates
    mfu: float | None
    dies: int
    notes: tuple[str, ...]

    @property
    def per_die(self) -> Rates:
        """Tokens per second of a die."""
        return self.per_card.over(DIES_OF_A_CARD)

    def as_dict(self) -> dict[str, Any]:
        """Return the column as JSON-ready values."""
        return {**asdict(self), "per_die": asdict(self.per_die)}


def column_of_run(run: Run, peak: float) -> Column:
    """Make the column of a run; `peak` is in TFLOPS of a die."""
    statistics, notes, mfu = run.statistics, [run.conditions], None
    if run.model is None:
        notes.append("no MFU: the run kept no model.json and its model is not on this machine. Pass --model")
    elif not run.emulated:
        try:
            mfu = utilisation(run.model, statistics, run.dies, peak)
        except UnknownModelError as error:
            notes.append(f"no MFU: {error}")
    if run.offload is not None:
        notes.append(f"the stages include {run.offload:.2f} s of moving tensors to and from the host")
    if run.planned_steps is not None:
        notes.append(f"it has not finished its {run.planned_steps} steps")
    if run.emulated:
        notes.append("on emulated dies: seconds and tokens a second do not apply to an NPU, and there is no MFU")
    steps = f"step {run.steps[0]}" if len(run.steps) == 1 else f"steps {run.steps[0]}-{run.steps[-1]}"
    cards = run.dies / DIES_OF_A_CARD
    return Column(run.name, steps, statistics, rates(statistics, cards), mfu, run.dies, tuple(notes))


def column_of_published(row: PublishedRow, peak: float) -> Column:
    """Make the column of a published row, with the MFU computed from it."""
    dies = CARDS * DIES_OF_A_CARD
    mfu = utilisation(DEEPSEEK_V3, row.statistics, dies, peak)
    return Column(row.name, f"step {row.step}", row.statistics, row.rates, mfu, dies, row.conditions)


def _seconds(name: str, column: Column) -> float | None:
    return column.statistics.seconds[name]


def render(columns: Sequence[Column], peak: float, source: str) -> str:
    """Format the table: a column for each entry, quantities as rows in the recipe's order, and the notes below."""
    width = max(18, *(len(column.name) + 2 for column in columns))

    def row(label: str, value: Callable[[Column], float | str | None], digits: int = 2) -> str:
        return f"{label:<{_LABEL_WIDTH}}" + "".join(f"{_text(value(column), digits):>{width}}" for column in columns)

    lines = [row("", lambda column: column.name), row("", lambda column: column.steps), "seconds"]
    for name, label in _SECONDS.items():
        lines.append(row(f"  {label}", partial(_seconds, name)))
    lines.append(row("  saving and validation", lambda column: column.statistics.aside))
    lines.append(row("  total", lambda column: column.statistics.total))
    for unit in ("card", "die"):
        lines.append(f"tokens a second and {unit}")
        for name in ("rollout", "training", "system"):
            lines.append(row(f"  {name}", attrgetter(f"per_{unit}.{name}")))
        lines.append(row("  system, training only", attrgetter(f"per_{unit}.trained")))
    lines += [
        row("MFU of the update, %", lambda column: None if column.mfu is None else 100 * column.mfu, 3),
        row("tokens in, mean", lambda column: column.statistics.prompt_tokens, 1),
        row("tokens out, mean", lambda column: column.statistics.response_tokens, 1),
        row("responses truncated, %", lambda column: _percent(column.statistics.truncated), 1),
        row("sequences", lambda column: column.statistics.sequences, 0),
        row("dies", lambda column: column.dies, 0),
        "",
        f"MFU takes {peak:g} TFLOPS a die for dense BF16 ({source}).",
        "Recomputation does not count as work. Offload etc. is the rest of the total.",
        "The total and system include saving and validation; training only excludes them.",
    ]
    for column in columns:
        lines += ["", f"{column.name}:"]
        for note in column.notes:
            lines += textwrap.wrap(note, _NOTE_WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return "\n".join(lines)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _text(value: float | str | None, digits: int) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.{digits}f}"
