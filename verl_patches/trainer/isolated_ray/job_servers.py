"""Ray 2.46 without the HTTP server of its agents, which runs commands for whoever connects; no option closes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PROBE = "ray.dashboard.optional_deps"


@contextmanager
def without_job_servers() -> Iterator[None]:
    """Ray that is started inside has agents without HTTP: no jobs (port 52365), no metrics.

    Ray leaves the server away where the packages that it needs are missing, and finds that out by an import; inside,
    this process misses them. Ray's processes get the answer on their command line.
    """
    missing = object()
    found = sys.modules.get(_PROBE, missing)
    sys.modules[_PROBE] = None  # type: ignore[assignment]  # makes the import raise ImportError
    try:
        yield
    finally:
        if found is missing:
            del sys.modules[_PROBE]
        else:
            sys.modules[_PROBE] = found  # type: ignore[assignment]  # what was there before
