"""Run the self-test of a node's dies in child processes with a time limit, so that a die that hangs is named too."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from post_training.claimed_dies import DiesInUse, claimed_dies
from post_training.processes.logs import last_words
from scripts.health_checks.finding import Finding
from scripts.health_checks.node import emulated

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (sys.executable, "-m", "scripts.health_checks.device_checks")
START_SECONDS, CHECK_SECONDS, EMULATED_SECONDS = 120.0, 10.0, 120.0
"""Limits for importing torch_npu and opening the die; for all checks together after that; and for these on emulated
dies, which are slower the busier this machine is."""

_START, _EXCHANGE = "start", "empty all-to-all"
_RANKS = 2
_KILL_SECONDS = 5.0
_REPORT = "install the driver and CANN of the pins, try another die, and report the finding to the vendor"
_REMEDIES = {
    "NaN in maxima": f"upstream's alerts and clipping would miss NaN: {_REPORT}",
    "non-finite check": f"updates with bad gradients would not be skipped: {_REPORT}",
    "large tensors": f"gradient buffers of large models would be wrong: {_REPORT}",
    "event order": f"weights would be read while they are written: {_REPORT}",
    _EXCHANGE: f"reshard and sample references would mix their parts: {_REPORT}",
}
_OF_HANG = "check dmesg and the plogs of the die, stop its processes, and reset it"
_OF_END = "source CANN's set_env.sh, and fix what is BAD above; the command on its own prints more"


@dataclass
class _Rank:
    """A child process, and the files that it writes."""

    number: int
    process: subprocess.Popen[bytes]
    said: Path
    errors: Path

    def lines(self) -> list[dict[str, str]]:
        """Return the objects that it has printed, without other output or a line that is still being written."""
        found = []
        for line in self.said.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                found.append(entry)
        return found

    def running(self) -> str:
        """Return the check that it has begun and not ended; empty if there is none."""
        lines = self.lines()
        begun = [line["begins"] for line in lines if "begins" in line]
        ended = [line["check"] for line in lines if "check" in line]
        return begun[-1] if begun and begun[-1] not in ended else ""

    def is_ready(self) -> bool:
        """Return whether it has opened its die, or has ended."""
        return self.process.poll() is not None or any(line.get("check") == _START for line in self.lines())


def check_device(
    program: Sequence[str] = PROGRAM, start_s: float = START_SECONDS, check_s: float | None = None
) -> list[Finding]:
    """Test dies 0 and 1 in two child processes; return one finding per check, and one per die that hangs or ends.

    They are not tested if a job of this project uses one of them.

    Args:
        program: the command of a child, to which its rank and a file are added.
        start_s: seconds until torch_npu has opened a die.
        check_s: seconds for all checks after that; None is `CHECK_SECONDS`, or `EMULATED_SECONDS`.
    """
    allowed = check_s or (EMULATED_SECONDS if emulated() else CHECK_SECONDS)
    if importlib.util.find_spec("torch_npu") is None:
        return [Finding("device self-test", "not run: torch_npu is not installed", known=False)]
    try:
        with claimed_dies(_RANKS), tempfile.TemporaryDirectory(prefix="device-test-") as folder:
            return _run_children(program, Path(folder), start_s, allowed)
    except DiesInUse as error:
        reason = str(error).partition(" is invalid: ")[2].partition(". ")[0]
        return [Finding("device self-test", f"not run: {reason}", known=False)]


def _run_children(program: Sequence[str], folder: Path, start_s: float, allowed: float) -> list[Finding]:
    ranks = [_begin(program, rank, folder) for rank in range(_RANKS)]
    try:
        began = time.monotonic()
        while not all(rank.is_ready() for rank in ranks) and time.monotonic() - began < start_s:
            time.sleep(0.05)
        seconds = start_s
        if all(rank.is_ready() for rank in ranks):
            began, seconds = time.monotonic(), allowed
        while any(rank.process.poll() is None for rank in ranks) and time.monotonic() - began < seconds:
            time.sleep(0.05)
        hangs = [rank for rank in ranks if rank.process.poll() is None]
        return _findings(ranks, hangs, seconds)
    finally:
        for rank in ranks:
            _end(rank.process)


def _begin(program: Sequence[str], rank: int, folder: Path) -> _Rank:
    said, errors = folder / f"rank{rank}.jsonl", folder / f"rank{rank}.log"
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [*program, "--rank", str(rank), "--store", str(folder / "store")]
    with said.open("wb") as out, errors.open("wb") as log:
        process = _started(command, os.environ | {"PYTHONPATH": paths}, out, log)
    return _Rank(rank, process, said, errors)


def _started(
    command: Sequence[str], environment: dict[str, str], out: IO[bytes], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    # In a session of its own, so that killing its group also ends processes that the device's libraries have started.
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=log, start_new_session=True
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        process.wait(_KILL_SECONDS)
    except subprocess.TimeoutExpired:
        pass  # it is inside the driver, where no signal ends it; the finding reports the hang


def _findings(ranks: Sequence[_Rank], hangs: Sequence[_Rank], seconds: float) -> list[Finding]:
    found: dict[str, Finding] = {}
    for rank in ranks:
        for line in rank.lines():
            name, state = line.get("check", _START), line.get("state")
            if name == _START:
                continue
            each = _finding(name, state or "", line["said"])
            if name not in found or each.remedy:
                found[name] = each
    stopped = {rank.number: _hanging(rank, seconds) for rank in hangs}
    stopped |= {rank.number: _ended(rank) for rank in ranks if rank.process.poll() not in (0, None)}
    if 0 in stopped and ranks[0].running() != _EXCHANGE and ranks[1].running() in ("", _EXCHANGE):
        stopped.pop(1, None)  # it waits for die 0
    return [*found.values(), *stopped.values()]


def _finding(name: str, state: str, said: str) -> Finding:
    if state == "left out":
        return Finding(name, f"not run: {said}", known=False)
    return Finding(name, said, _REMEDIES[name] if state == "bad" else "")


def _hanging(rank: _Rank, seconds: float) -> Finding:
    return Finding(f"die {rank.number}", f"no answer within {seconds:.0f} s: {rank.running() or _START}", _OF_HANG)


def _ended(rank: _Rank) -> Finding:
    code, running = rank.process.poll(), rank.running()
    said = last_words(rank.errors.read_text(errors="replace"))
    why = f"ended by signal {-code}" if code is not None and code < 0 else f"ended with {code}"
    last = f": {said[:200]}" if said else ""
    return Finding(f"die {rank.number}", f"{running or _START} {why}{last}", _OF_END)
