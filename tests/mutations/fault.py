"""A mutant: one change to one file, and the tests that should kill it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("planted")


class FaultError(ValueError):
    """Raised for an unusable entry of the list or request for a sample; the message is one sentence."""


@dataclass(frozen=True)
class Fault:
    """One change to one file.

    ``file`` is relative to the tree's root; ``source`` is the whole file with the bug. ``tiers`` are lists of pytest
    selectors, run in this order until one kills the mutant.
    """

    name: str
    file: str
    source: str
    tiers: tuple[tuple[str, ...], ...]

    @property
    def area(self) -> str:
        """The top-level folder of the changed file."""
        return self.file.partition("/")[0]


def read_list(root: Path = ROOT, folder: Path = LIST) -> list[Fault]:
    """Read all list files and check that each entry still applies to the tree below ``root``.

    Raises:
        FaultError: an entry lacks a field, its text does not occur exactly once, or one of its tests is missing.
    """
    faults: list[Fault] = []
    for path in sorted(folder.glob("*.toml")):
        faults += _faults(root, path)
    names = [fault.name for fault in faults]
    for name in names:
        if names.count(name) > 1:
            raise FaultError(f'Two faults of the list are called "{name}": give each a name of its own.')
    return faults


def _faults(root: Path, path: Path) -> Iterator[Fault]:
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("fault", []):
        if set(entry) != {"name", "file", "text", "replacement", "tests"}:
            raise FaultError(
                f"{path.name}: an entry has the fields {', '.join(sorted(entry))}: give name, file, text, replacement "
                "and tests."
            )
        where = f'{path.name}, "{entry["name"]}"'
        changed = root / entry["file"]
        if not changed.is_file():
            raise FaultError(f"{where}: {entry['file']} does not exist; name the file that holds the text now.")
        source, text = changed.read_text(encoding="utf-8"), entry["text"]
        if source.count(text) != 1:
            raise FaultError(
                f"{where}: its text occurs {source.count(text)} times in {entry['file']}; choose one that occurs once."
            )
        for selector in entry["tests"]:
            if not (root / selector.partition("::")[0]).exists():
                raise FaultError(f"{where}: there is no test {selector}; name one that should notice the fault.")
        if not entry["tests"]:
            raise FaultError(f"{where}: it names no test; name those that should notice the fault.")
        yield Fault(entry["name"], entry["file"], source.replace(text, entry["replacement"]), (tuple(entry["tests"]),))
