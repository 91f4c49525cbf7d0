"""Ray's head without the processes that one machine does not need; no option of `ray.init` leaves them out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

# The autoscaler's monitor, and a server that without a dashboard only reports usage; `ray.init` waits for its imports.
_STARTED_BY = ("start_monitor", "start_api_server")


@contextmanager
def without_helpers() -> Iterator[None]:
    """Start Ray's head within this context without autoscaler and API server, which take seconds of a short run."""
    from ray._private.node import Node

    with ExitStack() as patches:
        for name in _STARTED_BY:
            patches.enter_context(mock.patch.object(Node, name, lambda *_, **__: None))
        yield
