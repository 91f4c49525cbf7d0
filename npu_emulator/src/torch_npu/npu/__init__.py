"""``torch.npu``: the device module."""

from npu_emulator import _C

from . import amp, memory, random, streams, utils  # noqa: F401
from .autocast_utils import *  # noqa: F403
from .autocast_utils import get_amp_supported_dtype  # noqa: F401
from .graphs import *  # noqa: F403
from .memory import *  # noqa: F403
from .npu_config import *  # noqa: F403
from .random import *  # noqa: F403
from .streams import Event, ExternalEvent, Stream, SyncLaunchStream  # noqa: F401
from .tensor_types import tensor_types
from .utils import *  # noqa: F403
from .utils import _get_device_index  # noqa: F401

globals().update(tensor_types())

init = _lazy_init = _C.initialize
is_initialized = _C.is_initialized
_is_in_bad_fork = _C.is_in_bad_fork


def __getattr__(name: str):
    # torch.utils.checkpoint keeps random states only where this is true.
    if name == "_initialized":
        return is_initialized()
    raise AttributeError(f"module 'torch.npu' has no attribute {name!r}")


def _lazy_call(callable, **_) -> None:
    """Run something that needs the device: at once, as setting it up costs nothing."""
    callable()
