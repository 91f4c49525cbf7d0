"""FSDP2, torch's `fully_shard`, on an NPU: every parameter is a DTensor whose rows are sharded over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def prepare() -> None:
    """Redirect torch.cuda calls of torch and verl to the NPU, and let models of DTensors be moved between devices.

    To check whether one tensor may take another's data, torch_npu has an operator of its own, for which DTensor lacks
    the rule that it has for torch's.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from torch_npu.contrib import transfer_to_npu  # noqa: F401

    compatible = torch.ops.aten._has_compatible_shallow_copy_type.default
    DTensor._op_dispatcher._custom_op_handlers.setdefault(compatible, _of_local_tensors)


def _of_local_tensors(operator: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply `operator` to this rank's local tensors in the place of DTensors."""
    from torch.distributed.tensor import DTensor

    return operator(*(each._local_tensor if isinstance(each, DTensor) else each for each in args), **kwargs)


def sharded_modules(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the modules that `fully_shard` was applied to; none under FSDP1."""
    from torch.distributed._composable.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def release(model: torch.nn.Module) -> None:
    """Free gathered parameters, so that each one is this rank's shard again."""
    for module in sharded_modules(model):
        module.reshard()


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float, **options: Any) -> torch.Tensor:
    """Clip gradients to `max_norm`; return the norm over all ranks, as a plain tensor where torch returns a DTensor."""
    from torch.distributed.tensor import DTensor
    from torch.nn.utils import clip_grad_norm_

    norm = clip_grad_norm_(list(parameters), max_norm, **options)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
