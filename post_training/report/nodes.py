"""Reads the layouts in which a supervised run made its steps, from its supervisor's record."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from post_training.report.metrics import read_entries

SUPERVISION = "supervision.jsonl"


@dataclass(frozen=True)
class Stretch:
    """The steps from `first` to `last`, both included, which were made in one layout."""

    first: int
    last: int
    nodes: int
    of_nodes: int
    layout: str


def nodes_by_step(folder: Path, last_step: int) -> list[Stretch]:
    """Return the stretches of a run that may go on with fewer nodes, in the order of steps; empty for other runs.

    A start continues from a checkpoint. Steps after it that an earlier start made are made again, and count for the
    later start.

    Raises:
        ReportError: the record cannot be read.
    """
    found: list[Stretch] = []
    known = {"nodes": int, "of_nodes": int, "from_step": int, "layout": str}
    for entry in read_entries(folder / SUPERVISION):
        if not all(isinstance(entry.get(key), kind) for key, kind in known.items()):
            continue
        begin = entry["from_step"]
        found = [replace(each, last=min(each.last, begin)) for each in found if each.first <= begin]
        found.append(Stretch(begin + 1, last_step, entry["nodes"], entry["of_nodes"], entry["layout"]))
    return _joined([each for each in found if each.first <= each.last])


def _joined(stretches: list[Stretch]) -> list[Stretch]:
    """Join consecutive stretches in the same layout, such as those before and after a failure that cost no node."""
    joined: list[Stretch] = []
    for each in stretches:
        before = joined[-1] if joined else None
        if before and (before.nodes, before.layout, before.last + 1) == (each.nodes, each.layout, each.first):
            joined[-1] = replace(before, last=each.last)
        else:
            joined.append(each)
    return joined
