"""FSDP2, torch's `fully_shard`, on an NPU: every parameter is a DTensor, of whose rows each rank has its share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def prepare() -> None:
    """Let what torch and verl ask of torch.cuda reach the NPU, and let models of DTensors be moved between devices.

    torch_npu answers whether one tensor may take the data of another by a kernel of its own, for which DTensor, unlike
    for torch's, has no rule.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from torch_npu.contrib import transfer_to_npu  # noqa: F401

    compatible = torch.ops.aten._has_compatible_shallow_copy_type.default
    DTensor._op_dispatcher._custom_op_handlers.setdefault(compatible, _of_local_tensors)


def _of_local_tensors(operator: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `operator` answers of the tensors that this rank has of DTensors."""
    from torch.distributed.tensor import DTensor

    return operator(*(each._local_tensor if isinstance(each, DTensor) else each for each in args), **kwargs)


def sharded_modules(model: torch.nn.Module) -> Iterator[Any]:
    """The modules that `fully_shard` was called with; none under FSDP1."""
    from torch.distributed._composable.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def release(model: torch.nn.Module) -> None:
    """Give up what is gathered, so that every parameter is this rank's share of it."""
    for module in sharded_modules(model):
        module.reshard()


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float, **options: Any) -> torch.Tensor:
    """Clip to `max_norm`; the norm over all ranks, of which torch returns this rank's share."""
    from torch.distributed.tensor import DTensor
    from torch.nn.utils import clip_grad_norm_

    norm = clip_grad_norm_(list(parameters), max_norm, **options)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
