"""The file in a run's folder that shows whether the run makes progress, for programs that look from outside.

    heartbeat.json  {"progress": int, "time": unix seconds, "step": int or null, "process": name, "phase": name or null}

`progress` grows whenever any rank or the training loop finishes a unit of work; `time` is when the driver noticed the
last one, by its own clock; `process` (a rank, or `trainer`) and `phase` are those of the most recent one. The driver's
hang detector replaces the file at once, at most every `watch.interval_s` seconds, and writes nothing while nobody makes
progress. A reader on another machine compares `progress` with what it read before, so that no two clocks are compared
and a file that an earlier start left does not count as progress.
"""

from __future__ import annotations

import json
from pathlib import Path

HEARTBEAT = "heartbeat.json"


def read_progress(folder: Path) -> int | None:
    """Return `progress` of the run in `folder`; None where there is no file, or none that can be read."""
    try:
        found = json.loads((folder / HEARTBEAT).read_text(encoding="utf-8"))["progress"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None
