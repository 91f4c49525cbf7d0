"""Repairs the records of a resumed run: sets damaged lines aside, and removes steps that will be trained again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import NoneType

from post_training.checkpoint.durable import write_durably, write_text_durably
from post_training.report.metrics import PATCHES

BY_STEP = ("metrics.jsonl", "faults.jsonl", "alerts.jsonl")
# The keys that a line of a file must have, and the types of their values.
_NEEDED: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "metrics.jsonl": {"step": int, "time": (int, float), "metrics": dict},
    "faults.jsonl": {"step": (int, NoneType), "time": (int, float), "kind": str, "message": str},
    "alerts.jsonl": {"step": int},
    "events.jsonl": {"time": (int, float), "event": str},
}
# The same for every process's own file in the folder `PATCHES`.
_NEEDED_OF_PATCHES: Mapping[str, type] = {"executed": list}
DAMAGED = ".damaged"
"""Suffix of a file's name for its lines that were set aside."""


def set_aside_damaged(folder: Path) -> list[str]:
    """Move complete but unreadable lines of the run's records in `folder` into files beside them.

    An unfinished last line stays, because it may still be being written.

    Returns:
        A sentence for each file that had such lines.
    """
    sentences = []
    of_patches = dict.fromkeys(sorted((folder / PATCHES).glob("*.jsonl")), _NEEDED_OF_PATCHES)
    for path, needed in ({folder / name: needed for name, needed in _NEEDED.items()} | of_patches).items():
        complete, _, unfinished = (path.read_bytes() if path.exists() else b"").rpartition(b"\n")
        lines = [line for line in complete.split(b"\n") if line.strip()]
        bad = [line for line in lines if not _is_record(line, needed)]
        if not bad:
            continue
        with path.with_name(path.name + DAMAGED).open("ab") as aside:
            aside.writelines(line + b"\n" for line in bad)
        kept = [line + b"\n" for line in lines if _is_record(line, needed)]
        write_durably(path, [*kept, unfinished], 0, lambda _: None)
        os.chmod(path, 0o644)
        count = "1 damaged line was" if len(bad) == 1 else f"{len(bad)} damaged lines were"
        sentences.append(f"{path}: {count} set aside in {path.name}{DAMAGED}")
    return sentences


def _is_record(line: bytes, needed: Mapping[str, type | tuple[type, ...]]) -> bool:
    try:
        record = json.loads(line)
    except ValueError:  # no JSON, or no UTF-8
        return False
    return isinstance(record, dict) and all(
        isinstance(record.get(key, ...), kinds) and not isinstance(record.get(key), bool)
        for key, kinds in needed.items()
    )


def take_back_steps(folder: str, step: int) -> None:
    """Remove the records of steps after `step` from the run's `folder`, and an unfinished last line too.

    Damaged lines are set aside with a warning. Each file is replaced atomically. An empty `folder` means no records.
    """
    for sentence in set_aside_damaged(Path(folder)) if folder else ():
        print(f"warning: {sentence}", flush=True)
    for name in BY_STEP if folder else ():
        path = Path(folder) / name
        if not path.exists():
            continue
        complete, _, _ = path.read_text().rpartition("\n")
        kept = [line for line in complete.splitlines() if (json.loads(line)["step"] or 0) <= step]
        write_text_durably(path, "".join(f"{line}\n" for line in kept))
        os.chmod(path, 0o644)
