"""When the results of collectives appear.

With NPU_EMULATOR_DEFERRED_COLLECTIVES=1 in the environment a process begins in the mode `deferred`.
"""

import contextlib
import os
from collections.abc import Iterator

from . import _C

if os.environ.get("NPU_EMULATOR_DEFERRED_COLLECTIVES", "0") not in ("0", "1"):
    raise RuntimeError("NPU_EMULATOR_DEFERRED_COLLECTIVES must be 0 or 1")
_C.set_deferred_collectives(os.environ.get("NPU_EMULATOR_DEFERRED_COLLECTIVES") == "1")


@contextlib.contextmanager
def deferred(on: bool = True) -> Iterator[None]:
    """Inside, collectives complete only at ``wait()`` or when the device is synchronised, as on a real NPU.

    Otherwise they are complete when they return, so code that forgets to wait goes unnoticed. Every rank of a group
    must enter it; it belongs to the process. If not `on`, collectives are complete inside when they return.
    """
    before = _C.deferred_collectives()
    _C.set_deferred_collectives(on)
    try:
        yield
    finally:
        _C.complete_deferred_collectives()
        _C.set_deferred_collectives(before)
