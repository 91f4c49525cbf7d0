"""The fast tier, `bash scripts/test.sh --fast`: which tests it takes, from what each file was measured to cost.

`durations.json` holds the processor seconds of each file's tests, those of their child processes included: they depend
little on what else the machine does. `bash scripts/test.sh --measure` writes it anew. A file that has not been measured
yet is taken, so that a new test is not forgotten.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = Path(__file__).with_name("durations.json")
MOST_SECONDS_OF_A_FILE = 4.0
LEFT_OUT = ("slow", "exhaustive")


def file_of(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()


def split(items: list[pytest.Item], seconds: Mapping[str, float]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that are in the tier, and the others."""
    chosen, others = [], []
    for item in items:
        marked = any(item.get_closest_marker(name) for name in LEFT_OUT)
        dear = seconds.get(file_of(item), 0.0) > MOST_SECONDS_OF_A_FILE
        (others if marked or dear or file_of(item).startswith("tests/upstream/") else chosen).append(item)
    return chosen, others


def measured() -> dict[str, float]:
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


class Selection:
    """Takes the tests of the tier."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        items[:], others = split(items, measured())
        config.hook.pytest_deselected(items=others)


class Measurement:
    """Writes what the tests of each file took that is neither slow nor exhaustive."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begin = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            if not any(item.get_closest_marker(name) for name in LEFT_OUT):
                self._seconds[file_of(item)] += sum(os.times()[:4]) - begin

    def pytest_sessionfinish(self) -> None:
        merge(DURATIONS, self._seconds)


def merge(durations: Path, seconds: Mapping[str, float]) -> None:
    """Write what files cost over what is known of them; several processes may, each for the files that it ran."""
    with durations.open("r+") as known:
        fcntl.flock(known, fcntl.LOCK_EX)
        merged = {file: spent for file, spent in json.load(known).items() if (ROOT / file).exists()}
        merged |= {file: round(spent, 1) for file, spent in seconds.items()}
        known.seek(0)
        known.write(json.dumps(dict(sorted(merged.items())), indent=1) + "\n")
        known.truncate()
