"""Ray 2.46 without its agents' HTTP server, which runs commands for whoever connects; no option turns it off."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PROBE = "ray.dashboard.optional_deps"


@contextmanager
def without_job_servers() -> Iterator[None]:
    """Start Ray's agents without HTTP within this context: no jobs (port 52365), no metrics.

    Ray omits the server if the packages that it needs are missing, and finds that out by an import, which fails within
    this context. Ray's processes get the result on their command line.
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
            sys.modules[_PROBE] = found  # type: ignore[assignment]  # the earlier entry
