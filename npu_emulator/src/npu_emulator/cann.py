"""The folder of the emulated CANN, and its library for Python.

Standard library only, and nothing else of this package, because the loader of CANN and the reader of its counters both
need it.
"""

import ctypes
from pathlib import Path

FOLDER = Path(__file__).parent
_CORE = "libnpu_emulator_cann.so"


def library() -> ctypes.CDLL:
    """Return the emulated CANN of this process."""
    return ctypes.CDLL(str(FOLDER / "lib" / _CORE))
