"""Which operators of torch_npu are emulated, and which of those a run reached."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .operators import emulated

_CATALOGUE = Path(__file__).with_name("torch_npu_operators.txt")
REACHED_OPERATORS = Path(__file__).with_name("reached_operators.json")


@dataclass(frozen=True)
class Coverage:
    """Operators by full name: how often each emulated one was called, those that are not emulated, and why not.

    `users` are the code bases that reach an operator with dense and DeepSeek models, weights in bf16; `elsewhere` says
    where they call it otherwise.
    """

    calls: dict[str, int]
    not_emulated: list[str]
    users: dict[str, list[str]]
    elsewhere: dict[str, list[str]]

    @property
    def reached(self) -> list[str]:
        return [name for name, count in self.calls.items() if count]

    @property
    def missing(self) -> list[str]:
        """What code bases reach although it is not emulated."""
        return [name for name in self.users if name not in self.calls]

    def __str__(self) -> str:
        lines = [
            f"{name:45} emulated, {f'called {count} times' if count else 'not called'}{self._reach(name)}"
            for name, count in self.calls.items()
        ]
        lines += [f"{name:45} not emulated{self._reach(name)}" for name in self.not_emulated]
        summary = (
            f"{len(self.calls)} emulated, {len(self.reached)} of them called; "
            f"{len(self.users) - len(self.missing)} of {len(self.users)} that the code bases reach are emulated; "
            f"{len(self.not_emulated)} of torch_npu 2.5.1 and of extensions are not emulated"
        )
        return "\n".join([*lines, summary])

    def _reach(self, name: str) -> str:
        if name in self.users:
            return f"; reached by {', '.join(self.users[name])}"
        return f"; elsewhere, for {', '.join(self.elsewhere[name])}" if name in self.elsewhere else ""


def catalogue() -> list[str]:
    """The operators that torch_npu 2.5.1.post1 registers, backward functions apart, by full name."""
    return [line for line in _CATALOGUE.read_text().splitlines() if line and not line.startswith("#")]


def reached_operators() -> dict[str, dict[str, list[str]]]:
    """What the sources of verl, vllm-ascend, MindSpeed and MindSpeed-LLM reach: the files that do, by operator."""
    return json.loads(REACHED_OPERATORS.read_text())


def measure(meter_files: Iterable[Path] = ()) -> Coverage:
    """Coverage, with the calls that files written by `meters` hold added up."""
    called: Counter = Counter()
    for file in meter_files:
        for name, numbers in json.loads(file.read_text())["operators"].items():
            called[name] += numbers["calls"]
    names = {name.split(".")[0]: name for name in emulated()}
    calls = {name: called[full] for name, full in sorted(names.items())}
    found = reached_operators()
    users = {name: sorted({place.split()[0] for place in places}) for name, places in found["reached"].items()}
    others = sorted({*catalogue(), *users, *found["elsewhere"]} - names.keys())
    return Coverage(calls, others, users, found["elsewhere"])
