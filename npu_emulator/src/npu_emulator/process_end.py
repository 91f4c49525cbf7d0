"""Calls functions at the end of a process, also of one forked by multiprocessing, which skips atexit's functions."""

import atexit
from collections.abc import Callable
from multiprocessing import util


def at_process_end(action: Callable[[], object]) -> None:
    """Call `action`, which has to outlive the process, at the end of this process and of the ones forked from it.

    A process that is killed, or calls ``os._exit`` itself, ends without it.
    """
    atexit.register(action)
    util.register_after_fork(action, lambda action: util.Finalize(None, action, exitpriority=0))
