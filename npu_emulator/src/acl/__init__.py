"""Stand-in for the Python binding of AscendCL: what Ray and vllm-ascend ask it."""

from . import rt  # noqa: F401

SUCCESS = 0


def init(config_path: str = "") -> int:
    return SUCCESS


def finalize() -> int:
    return SUCCESS


def get_soc_name() -> str:
    return "Ascend910B3"
