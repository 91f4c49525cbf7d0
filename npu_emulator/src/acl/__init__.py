"""The part of CANN's own Python package that Ray, vllm-ascend and MindSpeed use, on the emulated CANN."""

import os
from pathlib import Path

from . import rt

__all__ = ["get_soc_name", "rt"]

_DEFAULT = Path(__file__).parents[1] / "npu_emulator" / "toolkit" / "chip"


def get_soc_name() -> str:
    """Return the chip's name as aclrtGetSocName does."""
    return os.environ.get("NPU_EMULATOR_CHIP") or _DEFAULT.read_text().strip()
