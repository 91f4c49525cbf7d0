"""The file in a run's folder that tells other programs whether the run makes progress.

    heartbeat.json  {"progress": int, "time": unix seconds, "step": int or null, "process": name, "phase": name or null}

`progress` grows whenever any rank or the training loop finishes a unit of work; `time` is when the driver noticed the
last unit, by its own clock; `process` (a rank, or `trainer`) and `phase` are those of the last unit. The driver's hang
detector replaces the file atomically, at most every `watch.interval_s` seconds, and only after progress. A reader on
another machine compares `progress` with the value that it read before. So it compares no clocks, and does not take a
file that an earlier start left for progress.
"""

from __future__ import annotations

import json
from pathlib import Path

HEARTBEAT = "heartbeat.json"


def read_progress(folder: Path) -> int | None:
    """Return `progress` of the run in `folder`; None if there is no readable file."""
    try:
        found = json.loads((folder / HEARTBEAT).read_text(encoding="utf-8"))["progress"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None
