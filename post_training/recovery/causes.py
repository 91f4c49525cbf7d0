"""Why a run failed: its exit code, the sentence that it ended with, and what its processes printed, as one cause.

The signs are those of this project's sentences, of Ray's exceptions, and of CANN's and HCCL's error codes, which
precede their text wherever it comes from (``EI0006: ... Getting socket times out``; see the vendor's list of error
codes, "EI" for HCCL and "EJ" for the process beneath it).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from post_training.report.faults import INVALID, NOT_ANSWERING, REWARD_FAILED

Cause = Literal[
    "OOM",
    "network_error",
    "worker_died",
    "ray_died",
    "host_memory",
    "hang",
    "bad_configuration",
    "reward_error",
    "not_valid",
    "full_disk",
    "interrupted",
    "unknown",
]
Stage = Literal["rollout", "log_prob", "update"]
CAUSES: tuple[Cause, ...] = get_args(Cause)

# Exit codes of the entry point and of the launchers (see their --help).
_REFUSED, _NO_RAY, _NODES_MISSING, _RAY_ENDED = 2, 3, 4, 5
_SIGNALLED = 128
_ASKED_TO_END = (130, 143, -2, -15)

# In this order: who has lost a peer says so too, so a full disk comes before the worker that died of it, and that
# before the connections that broke. Ray's text about any dead worker speaks of "the OOM killer": no sign of memory.
_SIGNS: tuple[tuple[Cause, str], ...] = (
    ("full_disk", r"No space left on device|Disk quota exceeded|the disk that holds .* is full"),
    ("not_valid", r"\bhold inf or nan in\b"),
    ("host_memory", r"ran out of host memory|exceeds the memory usage threshold|the node running low on memory"),
    ("OOM", r"NPU out of memory|ran out of device memory"),
    ("ray_died", r"Ray ended during the run|Ray lost the nodes? |NodeDiedError|its node has died"),
    ("worker_died", r"ActorDiedError|ActorUnavailableError|WorkerCrashedError|worker died or was killed"),
    (
        "network_error",
        r"\b(?:EI000[2-9]|EI001\d|EJ000\d)\b|[Aa]ddress already in use"
        r"|Connection (?:refused|reset by peer|timed out)|No route to host|Network is unreachable",
    ),
)
_STAGES: tuple[tuple[Stage, str], ...] = (
    ("rollout", r"generate_sequences"),
    ("log_prob", r"compute_(?:ref_)?log_prob"),
    ("update", r"update_(?:actor|critic)|compute_values"),
)
_TASK = re.compile(r"ray::\w+\.(\w+)\(\)")


@dataclass(frozen=True)
class Failure:
    """Why a run failed. sentence: for a person. stage: of a step, where the log names the task that failed."""

    cause: Cause
    sentence: str
    stage: Stage | None = None


def classify(code: int, sentence: str, log: str, faults: Sequence[Mapping[str, Any]] = ()) -> Failure:
    """The cause of a run's end.

    Args:
        code: exit status, not 0; negative for a signal.
        sentence: what the run said in the end; may be empty.
        log: the end of what it printed.
        faults: what it wrote into `faults.jsonl`.
    """
    said = sentence or _last_line(log) or f"it ended with exit status {code}"
    by_code: dict[int, Cause] = {
        _REFUSED: "bad_configuration",
        _NO_RAY: "network_error",
        _NODES_MISSING: "network_error",
        _RAY_ENDED: "ray_died",
        **dict.fromkeys(_ASKED_TO_END, "interrupted"),
    }
    if code in by_code:
        return Failure(by_code[code], said)
    if any(fault["kind"] == NOT_ANSWERING and fault.get("ended") for fault in faults):
        return Failure("hang", said)
    if REWARD_FAILED in said:
        return Failure("reward_error", said)
    if INVALID in said:
        return Failure("not_valid", said)
    for text in (sentence, log):
        for cause, sign in _SIGNS:
            if re.search(sign, text):
                return Failure(cause, said, _stage(log))
    if code < 0 or code > _SIGNALLED:
        number = -code if code < 0 else code - _SIGNALLED
        return Failure("worker_died", f"the command was ended by signal {number}")
    return Failure("unknown", said)


def _stage(log: str) -> Stage | None:
    """The stage whose task failed last, by Ray's name of it: ``ray::WorkerDict.actor_rollout_update_actor()``."""
    for task in reversed(_TASK.findall(log)):
        for stage, name in _STAGES:
            if re.search(name, task):
                return stage
    return None


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else ""
