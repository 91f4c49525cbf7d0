"""Where the emulated CANN lies, and how Python reaches it.

Standard library only, and nothing else of this package: what loads CANN and what reads its counters both need it.
"""

import ctypes
from pathlib import Path

FOLDER = Path(__file__).parent
_CORE = "libnpu_emulator_cann.so"


def library() -> ctypes.CDLL:
    """The emulated CANN of this process."""
    return ctypes.CDLL(str(FOLDER / "lib" / _CORE))
