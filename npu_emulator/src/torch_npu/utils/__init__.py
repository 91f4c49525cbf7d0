"""torch_npu.utils: the names that MindSpeed and vllm-ascend import."""

from .flops_count import _FlopsCounter as FlopsCounter  # noqa: F401


def register_asd_hook(*args, **options) -> None:
    """Silent-error detection has nothing to detect here."""


def set_asd_loss_scale(loss_scale: float = 1.0) -> None:
    """Silent-error detection has nothing to detect here."""
