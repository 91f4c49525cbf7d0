"""The collectives that a rank has called, stored beside the heartbeat of a hung run.

torch_npu itself records them: `TORCH_HCCL_TRACE_BUFFER_SIZE=2000` makes its process groups keep the last 2000 calls
of a process (torch's flight recorder). A rank that has made no progress for a while writes its recorded calls:

    RUN/calls/RANK.json  {"rank": int, "time": unix seconds, "phase": name or null, "where": place, "groups": [...],
                          "calls": [...]}

A group is {"name", "about", "ranks"}, a call {"group", "number", "name", "sizes", "entered_ns", "finished_ns" or null,
"where"}. `number` counts the collectives of a group from 1. A rank that recovers removes its file, so a run in
which nothing hangs has none.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from post_training.hang_detection.signs import Send, Sign

CALLS = "calls"
"""The folder in that of the run."""
BUFFER = "TORCH_HCCL_TRACE_BUFFER_SIZE"
"""The variable that makes torch_npu record; it is read when the first group of a process is made."""
# Paths of torch's own frames, which do not show who called.
_OF_TORCH = ("/torch/", "/torch_npu/")
# Collectives whose inputs have the same size on all ranks.
_EVEN = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier")


class CallsError(ValueError):
    """A file of calls cannot be read; the message is one sentence."""


@dataclass(frozen=True)
class RankGroup:
    """A process group.

    Attributes:
        name: torch's name of the group.
        about: its purpose, as given when it was created; empty if none was.
        ranks: its members, in order.
    """

    name: str
    about: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return self.about or self.name


@dataclass(frozen=True)
class Call:
    """A collective that a rank has called.

    Attributes:
        group: name of its group.
        number: of this collective in the group, from 1; ranks meet in equal numbers.
        name: torch's function, such as `all_reduce`.
        sizes: of its inputs, in elements.
        entered_ns: when it was called, in unix nanoseconds.
        finished_ns: when torch_npu's watchdog saw that it had finished; None while it has not.
        where: who called it.
    """

    group: str
    number: int
    name: str
    sizes: tuple[tuple[int, ...], ...]
    entered_ns: int
    finished_ns: int | None
    where: str

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal on all ranks that call the same collective."""
        return (self.name, self.sizes if self.name in _EVEN else ())


@dataclass(frozen=True)
class RankCalls:
    """The collectives that a rank called, and its state when it wrote them.

    Attributes:
        time: when it wrote them, in unix seconds.
        phase: the phase that it was in.
        where: the place of its code.
        groups: its process groups.
        calls: in the order in which it called them.
    """

    rank: int
    time: float
    phase: str | None
    where: str
    groups: tuple[RankGroup, ...]
    calls: tuple[Call, ...]

    @property
    def waits_for(self) -> Call | None:
        """The first call that has not finished."""
        return next((call for call in self.calls if call.finished_ns is None), None)

    @property
    def last_finished(self) -> Call | None:
        """The last call that has finished."""
        done = [call for call in self.calls if call.finished_ns is not None]
        return done[-1] if done else None

    @classmethod
    def recorded(cls, rank: int, sign: Sign, dump: Mapping[str, Any]) -> RankCalls:
        """Read a dump of torch_npu's recorder. Messages between two ranks are left out: the dump names no peer."""
        groups = tuple(
            RankGroup(str(each["name"]), _about(each["desc"]), tuple(ast.literal_eval(each["ranks"])))
            for each in dump["pg_config"].values()
        )
        calls = tuple(_call(entry) for entry in dump.get("entries", ()) if not entry["is_p2p"])
        return cls(rank, time.time(), sign.phase, sign.where, groups, calls)

    def write(self, folder: Path) -> None:
        """Write the rank's file into the folder of a run atomically."""
        file = folder / CALLS / f"{self.rank}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(self)) + "\n")
        unfinished.replace(file)


def read_calls(folder: Path) -> dict[int, RankCalls]:
    """Read the calls that the ranks of a run wrote, by rank; empty if no rank hangs.

    Raises:
        CallsError: a file is not one of calls.
    """
    found = {}
    for file in (folder / CALLS).glob("*.json"):
        try:
            content = json.loads(file.read_text())
            content["groups"] = tuple(
                RankGroup(each["name"], each["about"], tuple(each["ranks"])) for each in content["groups"]
            )
            content["calls"] = tuple(
                Call(**each | {"sizes": tuple(map(tuple, each["sizes"]))}) for each in content["calls"]
            )
            # The clock of the file system is the same for all nodes.
            own = RankCalls(**content | {"time": file.stat().st_mtime})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CallsError(f"{file} is not a file of calls ({error})") from error
        found[own.rank] = own
    return dict(sorted(found.items()))


class CallsOfStalledRank:
    """Forwards heartbeats, and writes the rank's file of calls while they show no progress.

    Args:
        send: takes a heartbeat.
        rank: of this process.
        folder: of the run.
        after_s: seconds without progress after which the file is written.
        dump: returns what torch_npu has recorded.
        clock: returns seconds since an arbitrary moment.
    """

    def __init__(
        self,
        send: Send,
        rank: int,
        folder: Path,
        after_s: float,
        dump: Callable[[], Mapping[str, Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send, self._rank, self._folder, self._after_s = send, rank, folder, after_s
        self._dump, self._clock = dump or recorded_by_torch_npu, clock
        self._moves, self._since, self._written = -1, clock(), False

    def __call__(self, name: str, content: bytes) -> None:
        """Take a heartbeat of this process."""
        sign, now = Sign.unpacked(content), self._clock()
        if sign.moves != self._moves:
            self._moves, self._since = sign.moves, now
            if self._written:
                (self._folder / CALLS / f"{self._rank}.json").unlink(missing_ok=True)
                self._written = False
        elif now - self._since >= self._after_s:
            # Written again each time: a collective of another thread may have finished since.
            RankCalls.recorded(self._rank, sign, self._dump()).write(self._folder)
            self._written = True
        self._send(name, content)


def recorded_by_torch_npu() -> dict[str, Any]:
    """Return the dump of torch_npu's recorder for this process; an empty one if torch_npu is not loaded."""
    torch_npu = sys.modules.get("torch_npu")
    if torch_npu is None:
        return {"pg_config": {}, "entries": []}
    dump: dict[str, Any] = pickle.loads(  # its own bytes, of this process
        torch_npu._C._distributed_c10d._dump_hccl_trace(
            includeCollectives=True, includeStackTraces=True, onlyActive=False
        )
    )
    # torch_npu 2.10 leaves descriptions out, and puts `group_name_` before torch's names of groups.
    described = _descriptions()
    for name, group in dump["pg_config"].items():
        group["desc"] = described.get(name.removeprefix("group_name_"), group["desc"])
    return dump


def _descriptions() -> dict[str, str]:
    """Return torch's descriptions of this process's groups, by torch's names of them."""
    from torch.distributed import distributed_c10d

    return {name: group.group_desc for group, name in distributed_c10d._world.pg_names.items()}


def _call(entry: Mapping[str, Any]) -> Call:
    """Make a call from an entry of the recorder."""
    frames = entry.get("frames", ())
    # torch_npu 2.10 leaves the name out; it is that of the innermost function of torch.distributed.
    functions = (frame["name"] for frame in frames if "/torch/distributed/" in frame["filename"])
    name = entry["profiling_name"].rpartition(":")[2] or next(functions, "unknown")
    # An event that was not recorded yet counts as completed there, so `retired` alone says that a call has finished.
    seen = entry["time_discovered_completed_ns"]
    return Call(
        group=entry["process_group"][0],
        number=entry["collective_seq_id"],
        name=name,
        sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        entered_ns=entry["time_created_ns"],
        finished_ns=seen if entry["retired"] else None,
        where=_caller(frames),
    )


def _about(description: str) -> str:
    """Return torch's `group_desc`; empty if there is none, for which torch_npu writes `undefined`."""
    return "" if description == "undefined" else str(description)


def _caller(frames: Sequence[Mapping[str, Any]]) -> str:
    """Describe the innermost frame outside torch; if there is none, as in a backward pass, the outermost one."""
    for frame in [*(each for each in frames if not any(part in each["filename"] for part in _OF_TORCH)), *frames[-1:]]:
        return f"{Path(frame['filename']).name}:{frame['line']} in {frame['name']}"
    return "unknown"
