"""The part of the compiled torch_npu that Python code of others reaches for."""

from ..npu.utils import get_soc_version as _npu_get_soc_version  # noqa: F401
from . import _distributed_c10d  # noqa: F401


class _NPUTaskGroupHandle:
    """A handle of a captured group of tasks, which is not emulated."""
