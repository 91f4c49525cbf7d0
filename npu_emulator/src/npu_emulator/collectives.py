"""When the results of collectives appear."""

import contextlib
from collections.abc import Iterator

from . import _C


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside, collectives complete only at ``wait()`` or when the device is synchronised, as on a real NPU.

    Otherwise they are complete when they return, so code that forgets to wait goes unnoticed. Every rank of a group
    must enter it; it belongs to the process.
    """
    before = _C.deferred_collectives()
    _C.set_deferred_collectives(True)
    try:
        yield
    finally:
        _C.complete_deferred_collectives()
        _C.set_deferred_collectives(before)
