"""Megatron-core tells types of tensors apart by the names that they have on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_plugin.features.megatron_core.feature import MEGATRON_CORE

if TYPE_CHECKING:
    from torch import Tensor


@wrap(
    "torch._tensor:Tensor.type",
    feature=MEGATRON_CORE,
    why="Megatron-core's optimizers compare `param.type()` with `torch.cuda.BFloat16Tensor` and the like, and reject "
    "the NPU's names; the texts are literals in their constructors, which no spec or setting reaches, and "
    "transfer_to_npu only replaces functions of torch.cuda",
    upstream="docs/upstream/megatron-tensor-type.md",
    remove_when="Megatron-core compares `param.dtype`",
    relies_on=(
        "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups",
        "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
        "torch_npu.utils.tensor_methods:_npu_type",  # which torch_npu puts there when it is imported
    ),
    only_here=True,
    evidence="executed",
)
def type_as_on_cuda(upstream: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    found = upstream(tensor, *args, **kwargs)
    return found.replace("torch.npu.", "torch.cuda.") if isinstance(found, str) else found
