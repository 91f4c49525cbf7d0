"""The fast tier, `bash scripts/test.sh --fast`: selects tests by the measured cost of each file.

`durations.json` holds the CPU seconds of each file's tests, including their child processes; CPU time depends little on
the load of the machine. `bash scripts/test.sh --measure` rewrites it. A file without a measurement is included, so that
new tests are not forgotten.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.forked import SPENT

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = Path(__file__).with_name("durations.json")
MOST_SECONDS_OF_A_FILE = 2.0
LEFT_OUT = ("slow", "exhaustive")
NEEDS_CHECKOUTS = "upstream"
"""The folder whose tests need upstream checkouts, which a fast run cannot have."""


def file_of(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()


def is_left_out(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in LEFT_OUT)


def folder_of(file: str) -> str | None:
    """Return the top test folder that a file belongs to, or None for a file directly in `tests`."""
    parts = Path(file).parts
    return parts[1] if len(parts) > 2 else None


def taken_files(files: Iterable[str], seconds: Mapping[str, float]) -> set[str]:
    """Return the cheap files, and the cheapest file of each folder that has no cheap one."""
    by_folder: dict[str | None, set[str]] = defaultdict(set)
    for file in files:
        by_folder[folder_of(file)].add(file)
    taken: set[str] = set()
    for folder, all_of_it in by_folder.items():
        cheap = {file for file in all_of_it if seconds.get(file, 0.0) <= MOST_SECONDS_OF_A_FILE}
        taken |= cheap or ({min(all_of_it, key=lambda file: (seconds[file], file))} if folder else set())
    return taken


def split(items: list[pytest.Item], seconds: Mapping[str, float]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split the tests into those in the tier and the rest."""
    plain = [item for item in items if not is_left_out(item)]
    taken = taken_files({file_of(item) for item in plain if folder_of(file_of(item)) != NEEDS_CHECKOUTS}, seconds)
    chosen, others = [], []
    for item in items:
        (others if is_left_out(item) or file_of(item) not in taken else chosen).append(item)
    return chosen, others


def measured() -> dict[str, float]:
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


class Selection:
    """Pytest plugin that selects the tests of the tier."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        items[:], others = split(items, measured())
        config.hook.pytest_deselected(items=others)


class Unmeasured:
    """Pytest plugin that selects measurable tests from files without a measurement."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        known, given = measured(), list(items)
        items[:] = [item for item in given if file_of(item) not in known and not is_left_out(item)]
        config.hook.pytest_deselected(items=[item for item in given if item not in items])


class Measurement:
    """Pytest plugin that records each file's cost, without its slow and exhaustive tests."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._folder = tempfile.TemporaryDirectory(prefix="spent-")
        self._by_forks = Path(self._folder.name, "by_forks")
        self._by_forks.touch()
        os.environ[SPENT] = str(self._by_forks)

    def _spent(self) -> float:
        """Return the CPU seconds of this process, its children and the forks that it requested."""
        return sum(os.times()[:4]) + sum(map(float, self._by_forks.read_text().split()))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begin = self._spent()
        try:
            return (yield)
        finally:
            if not is_left_out(item):
                self._seconds[file_of(item)] += self._spent() - begin

    def pytest_sessionfinish(self) -> None:
        merge(DURATIONS, self._seconds)


def merge(durations: Path, seconds: Mapping[str, float]) -> None:
    """Merge the costs of files into `durations`; several processes may do so, each for the files that it ran."""
    with durations.open("r+") as known:
        fcntl.flock(known, fcntl.LOCK_EX)
        merged = {file: spent for file, spent in json.load(known).items() if (ROOT / file).exists()}
        merged |= {file: round(spent, 1) for file, spent in seconds.items()}
        known.seek(0)
        known.write(json.dumps(dict(sorted(merged.items())), indent=1) + "\n")
        known.truncate()
