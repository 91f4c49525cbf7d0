"""Sums the counters of the emulated NPU, of which every process of a run writes a file."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from post_training.report.metrics import ReportError, read_objects


def read_meters(folder: Path) -> dict[str, Any] | None:
    """Sum the meter files of a run.

    Returns:
        None if there are no files, as on a real NPU. Otherwise a dictionary with ``processes``; ``collectives`` (kind
        -> count and bytes, over processes and group sizes: a collective among 4 ranks counts 4 times); ``copies``
        (direction -> count and bytes); ``operator_calls`` (total); ``peak_device_bytes`` (phase -> highest over
        processes and devices, with ``run`` for the whole life of a process).

    Raises:
        ReportError: a file is damaged; the message is one sentence.
    """
    snapshots = read_objects(sorted(folder.glob("*.json")))
    if not snapshots:
        return None
    try:
        return {
            "processes": len(snapshots),
            "collectives": _collectives(snapshots),
            "copies": _copies(snapshots),
            "operator_calls": sum(entry["calls"] for each in snapshots for entry in each["operators"].values()),
            "peak_device_bytes": _peaks(snapshots),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ReportError(f"{folder} has a file that no process wrote in this form ({error!r}).") from error


def _collectives(snapshots: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    totals: dict[str, Counter[str]] = {}
    for snapshot in snapshots:
        for kind, by_group_size in snapshot["collectives"].items():
            for counted in by_group_size.values():
                totals.setdefault(kind, Counter()).update(counted)
    return {kind: dict(total) for kind, total in sorted(totals.items())}


def _copies(snapshots: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    totals: dict[str, Counter[str]] = {}
    for snapshot in snapshots:
        for direction, counted in snapshot["copies"].items():
            totals.setdefault(direction, Counter()).update(counted)
    return {direction: dict(total) for direction, total in totals.items()}


def _peaks(snapshots: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for snapshot in snapshots:
        seen = [("run", device["peak_allocated"]) for device in snapshot["memory"].values()]
        for name, phase in snapshot["phases"].items():
            seen += [(name, size) for size in phase["peak_bytes"].values()]
        for name, size in seen:
            peaks[name] = max(peaks.get(name, 0), size)
    return peaks
