"""Ray's head without the processes that one machine does not need; no option of `ray.init` leaves them out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


def _start_nothing(*_: Any, **__: Any) -> None:
    """Takes the place of a method that starts a process."""


@contextmanager
def without_helpers() -> Iterator[None]:
    """Start Ray's head within this context without two processes, for whose imports `ray.init` waits.

    They are the autoscaler's monitor, and an API server that without a dashboard only reports usage.
    """
    from ray._private.node import Node

    with mock.patch.multiple(Node, start_monitor=_start_nothing, start_api_server=_start_nothing):
        yield
