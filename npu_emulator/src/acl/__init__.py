"""What Ray, vllm-ascend and MindSpeed use of CANN's own Python package, on the emulated CANN."""

import os

from . import rt

__all__ = ["get_soc_name", "rt"]


def get_soc_name() -> str:
    """The chip, as aclrtGetSocName says it."""
    return os.environ.get("NPU_EMULATOR_CHIP") or "Ascend910_9391"
