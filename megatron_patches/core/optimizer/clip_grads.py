"""Gradient clipping accepts gradients on an NPU."""

from collections.abc import Callable
from typing import Any

from megatron_patches.core.optimizer.cuda_type_names import cuda_type_names
from overlay import wrap
from verl_patches.features.compatibility.feature import MEGATRON_ON_NPU


@wrap(
    "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
    feature=MEGATRON_ON_NPU,
    why="it asserts that Tensor.type() of every gradient is torch.cuda.FloatTensor",
    upstream="docs/upstream/megatron-tensor-type.md",
    remove_when="Megatron checks the dtype of gradients, not the text of their type",
    evidence="executed",
)
def clip_grad_by_total_norm_fp32(upstream: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with cuda_type_names():
        return upstream(*args, **kwargs)
