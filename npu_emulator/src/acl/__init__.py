"""What Ray, vllm-ascend and MindSpeed use of CANN's own Python package, on the emulated CANN."""

import os
from pathlib import Path

from . import rt

__all__ = ["get_soc_name", "rt"]

_DEFAULT = Path(__file__).parents[1] / "npu_emulator" / "toolkit" / "chip"


def get_soc_name() -> str:
    """The chip, as aclrtGetSocName says it."""
    return os.environ.get("NPU_EMULATOR_CHIP") or _DEFAULT.read_text().strip()
