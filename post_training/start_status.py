"""The status of one start of a training, which the started processes report to the program that started them.

That program names a file in the environment variable `POST_TRAINING_STATUS`. The launcher of the node and then the
training itself replace the file as a whole, so that no reader sees half of it:

    {"role": "head" or "worker", "phase": "starting", "waiting", "training" or "ended", "exit_reason": a cause or null,
     "exit_code": int or null}

A field that is absent, or has a value that the reader does not know, has its default, so that either side may be newer
than the other. A launcher writes it by `python -m post_training.start_status role=worker phase=waiting`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

VARIABLE = "POST_TRAINING_STATUS"

Cause = Literal[
    "OOM",
    "network_error",
    "worker_died",
    "ray_died",
    "host_memory",
    "hang",
    "operator_error",
    "device_error",
    "bad_configuration",
    "reward_error",
    "not_valid",
    "full_disk",
    "in_use",
    "interrupted",
    "unknown",
]
"""Why a training ends before its last step."""
Role = Literal["head", "worker"]
Phase = Literal["starting", "waiting", "training", "ended"]
_VALUES = {"role": get_args(Role), "phase": get_args(Phase), "exit_reason": get_args(Cause)}


@dataclass(frozen=True)
class StartStatus:
    """The role of a start and how far it has come.

    Args:
        role: of the node; a worker gives its dies to the training of the head.
        phase: `waiting` means for other nodes, and on a worker for the end of the head's training.
        exit_reason: why the training ended, as far as it knows; None while it runs, after success, and if only its
            exit code and its log show the reason.
        exit_code: of the training, if the launcher ends with a code of its own.
    """

    role: Role = "head"
    phase: Phase = "starting"
    exit_reason: Cause | None = None
    exit_code: int | None = None

    @classmethod
    def read(cls, file: Path) -> StartStatus:
        """Return the status in `file`; the defaults if it does not exist or cannot be read."""
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls()
        given = found if isinstance(found, dict) else {}
        known: dict[str, Any] = {name: given[name] for name, values in _VALUES.items() if given.get(name) in values}
        code = given.get("exit_code")
        return cls(**known, exit_code=code if type(code) is int else None)

    def write(self, file: Path) -> None:
        """Replace `file` atomically."""
        unfinished = file.with_name(f".{file.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        unfinished.replace(file)


def report_status(**changes: Any) -> None:
    """Change fields in this process's status file; do nothing if it was given none.

    If the file cannot be written, a warning is printed: that is no reason to end a training.
    """
    if not os.environ.get(VARIABLE):
        return
    file = Path(os.environ[VARIABLE])
    try:
        replace(StartStatus.read(file), **changes).write(file)
    except OSError as error:
        print(f"warning: {VARIABLE}={file} cannot be written: {error.strerror}", file=sys.stderr)


if __name__ == "__main__":
    named: dict[str, Any] = dict(word.split("=", 1) for word in sys.argv[1:])
    report_status(**named | ({"exit_code": int(named["exit_code"])} if "exit_code" in named else {}))
