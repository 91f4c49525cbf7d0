"""Which operators of torch_npu are emulated, and which of those a run reached."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .operators import emulated

_CATALOGUE = Path(__file__).with_name("torch_npu_operators.txt")


@dataclass(frozen=True)
class Coverage:
    """Operators by full name: how often each emulated one was called, and those that are not emulated."""

    calls: dict[str, int]
    not_emulated: list[str]

    @property
    def reached(self) -> list[str]:
        return [name for name, count in self.calls.items() if count]

    def __str__(self) -> str:
        lines = [
            f"{name:45} emulated, {f'called {count} times' if count else 'not called'}"
            for name, count in self.calls.items()
        ]
        lines += [f"{name:45} not emulated" for name in self.not_emulated]
        summary = (
            f"{len(self.calls)} emulated, {len(self.reached)} of them called; "
            f"{len(self.not_emulated)} of torch_npu 2.5.1 are not emulated"
        )
        return "\n".join([*lines, summary])


def catalogue() -> list[str]:
    """The operators that torch_npu 2.5.1.post1 registers, backward functions apart, by full name."""
    return [line for line in _CATALOGUE.read_text().splitlines() if line and not line.startswith("#")]


def measure(meter_files: Iterable[Path] = ()) -> Coverage:
    """Coverage, with the calls that files written by `meters` hold added up."""
    called: Counter = Counter()
    for file in meter_files:
        for name, numbers in json.loads(file.read_text())["operators"].items():
            called[name] += numbers["calls"]
    names = {name.split(".")[0]: name for name in emulated()}
    calls = {name: called[full] for name, full in sorted(names.items())}
    return Coverage(calls, [name for name in catalogue() if name not in names])
