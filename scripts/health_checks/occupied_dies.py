"""Find dies of a job that another job uses: a job of this project holds them, or npu-smi shows processes on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from post_training.claimed_dies import DiesInUse, claimed_dies
from post_training.inherited_environment import VISIBLE
from scripts.health_checks.finding import Finding, ask
from scripts.health_checks.npus import find_tool, read_mapping

_WHAT = "dies in use"


@dataclass(frozen=True)
class Process:
    """A row of the table of processes in `npu-smi info`; `memory_mib` is its memory on the chip."""

    npu: int
    chip: int
    number: int
    name: str
    memory_mib: int


def read_processes(said: str) -> list[Process]:
    """Return the processes in the last table of `npu-smi info`; cards without any have a line of text there.

    | NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
    | 0       0                 | 602983        | python                   | 54729                   |
    """
    _, heading, table = said.partition("| Process id")
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
    found = []
    for row in rows if heading else ():
        numbers = [*row[0].split(), *row[1:2], *row[3:4]]
        if len(row) == 4 and len(numbers) == 4 and all(number.isdecimal() for number in numbers):
            npu, chip, process, memory = map(int, numbers)
            found.append(Process(npu, chip, process, row[2], memory))
    return found


def dies_in_use(dies: int, environment: Mapping[str, str], root: Path = Path("/")) -> Finding:
    """Check whether another job uses one of the dies that a job takes on this machine.

    Args:
        dies: number of the job's dies.
        environment: may contain CANN's list of visible NPUs; without it the job takes the first dies.
        root: the top of the file system.
    """
    try:
        with claimed_dies(dies, environment, root):
            pass
    except DiesInUse as error:
        reason, _, remedy = str(error).partition(" is invalid: ")
        return Finding(_WHAT, reason, remedy)
    smi = find_tool("npu-smi", root)
    numbers = {(chip.npu, chip.chip): chip.logic for chip in read_mapping(ask(smi, "info", "-m") or "")}
    busy: dict[int, Process] = {}
    for process in read_processes(ask(smi, "info") or ""):
        if (process.npu, process.chip) in numbers:
            busy.setdefault(numbers[process.npu, process.chip], process)
    return _described(dies, environment.get(VISIBLE), sorted(numbers.values()), busy)


def _described(dies: int, visible: str | None, there: Sequence[int], busy: Mapping[int, Process]) -> Finding:
    entries = [entry.strip() for entry in visible.split(",")] if visible else list(map(str, range(dies)))
    wanted = [int(entry) for entry in entries[:dies] if entry.isdecimal()]
    taken = [die for die in wanted if die in busy]
    if not there:
        return Finding(_WHAT, "npu-smi shows no dies", known=False)
    if not taken:
        return Finding(_WHAT, f"none of {dies}")
    process = busy[taken[0]]
    detail = f"die {taken[0]} by process {process.number} ({process.name}, {process.memory_mib} MB)"
    detail += f", {len(taken)} of {dies} in all" if len(taken) > 1 else ""
    free = [str(die) for die in there if die not in busy]
    remedy = "wait until that job has ended, or end it"
    if len(free) >= dies:
        remedy = f"set {VISIBLE}={','.join(free[:dies])}, which are free, or wait until that job has ended"
    return Finding(_WHAT, detail, remedy)
