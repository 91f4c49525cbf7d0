"""Derive the cause of a failed run from its exit code, the sentence that it ended with, and its processes' output.

The messages by which causes are recognised are in `signs.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from post_training.processes.logs import last_words
from post_training.recovery.signs import SIGNS, Sign, Stage
from post_training.report.faults import NOT_ANSWERING
from post_training.start_status import Cause

# Exit codes of the entry point and of the launchers (see their --help).
_REFUSED, _NO_RAY, _NODES_MISSING, RAY_ENDED = 2, 3, 4, 5
_SIGNALLED = 128
# SIGHUP, SIGINT, SIGQUIT and SIGTERM: the exit status of a process that handled them, and of one that they ended.
_ASKED_TO_END = (129, 130, 131, 143, -1, -2, -3, -15)
_SIGBUS = 7

_STAGES: tuple[tuple[Stage, str], ...] = (
    ("rollout", r"generate_sequences"),
    ("log_prob", r"compute_(?:ref_)?log_prob"),
    ("update", r"update_(?:actor|critic)|compute_values"),
)
_TASK = re.compile(r"ray::\w+\.(\w+)\(\)")


@dataclass(frozen=True)
class Failure:
    """Why a run failed.

    Attributes:
        sentence: explains the failure to a person.
        stage: of a training step; None if the log does not name the task that failed.
    """

    cause: Cause
    sentence: str
    stage: Stage | None = None


def classify(
    code: int, sentence: str, log: str, faults: Sequence[Mapping[str, Any]] = (), reason: Cause | None = None
) -> Failure:
    """Determine the cause of a run's end.

    Args:
        code: exit status, not 0; negative for a signal.
        sentence: the last error that the run reported; may be empty.
        log: the end of its output.
        faults: the entries of its `faults.jsonl`.
        reason: the cause that the run itself reported.
    """
    found = _find_sign(sentence, log)
    said = sentence or (found[1] if found else last_words(log)) or f"it ended with exit status {code}"
    if reason:
        return Failure(reason, said, _stage(log))
    by_code: dict[int, Cause] = {
        _REFUSED: "bad_configuration",
        _NO_RAY: "network_error",
        _NODES_MISSING: "network_error",
        RAY_ENDED: "ray_died",
        **dict.fromkeys(_ASKED_TO_END, "interrupted"),
    }
    if code in by_code:
        return Failure(by_code[code], said)
    if any(fault["kind"] == NOT_ANSWERING and fault.get("ended") for fault in faults):
        return Failure("hang", said)
    if found:
        sign = found[0]
        return Failure(sign.cause, said, sign.stage or _stage(log))
    if code < 0 or code > _SIGNALLED:
        number = -code if code < 0 else code - _SIGNALLED
        # A full /dev/shm ends a process by SIGBUS when it touches a new page there.
        cause: Cause = "host_memory" if number == _SIGBUS else "worker_died"
        return Failure(cause, f"the command was ended by signal {number}")
    return Failure("unknown", said)


def _find_sign(sentence: str, log: str) -> tuple[Sign, str] | None:
    """Find the first sign in the run's sentence, else in its log, and the last line with it; secondary signs last."""
    for secondary in (False, True):
        for text in (sentence, log):
            for sign in SIGNS:
                found = list(sign.expression.finditer(text)) if sign.secondary is secondary else []
                if found:
                    return sign, _line_around(text, found[-1])
    return None


def _line_around(text: str, match: re.Match[str]) -> str:
    begin = text.rfind("\n", 0, match.start()) + 1
    return text[begin:].partition("\n")[0].strip()


def _stage(log: str) -> Stage | None:
    """Return the stage whose task failed last, by Ray's task name: ``ray::WorkerDict.actor_rollout_update_actor()``."""
    for task in reversed(_TASK.findall(log)):
        for stage, name in _STAGES:
            if re.search(name, task):
                return stage
    return None
