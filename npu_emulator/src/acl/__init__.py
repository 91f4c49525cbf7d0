"""Stand-in for the Python binding of AscendCL: what Ray and vllm-ascend ask it."""

import os

from . import rt  # noqa: F401

SUCCESS = 0


def init(config_path: str = "") -> int:
    return SUCCESS


def finalize() -> int:
    return SUCCESS


def get_soc_name() -> str:
    """The chip that NPU_EMULATOR_CHIP names, or the Atlas A3's."""
    return os.environ.get("NPU_EMULATOR_CHIP") or "Ascend910_9391"
