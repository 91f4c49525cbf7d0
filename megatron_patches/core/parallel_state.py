"""Expert tensor parallelism as verl 0.4.0 asks for it, in terms of what megatron-core 0.8.0 has."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from overlay import add, wrap
from verl_patches.features.compatibility.feature import VERL_ON_MEGATRON_CORE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_WHY = "verl 0.4.0 reads the expert tensor parallel group, which megatron-core has since 0.10"
_UPSTREAM = "not forwarded: specific to this pair of releases; megatron-core has it since 0.10"
_REMOVE_WHEN = "the pinned megatron-core is 0.10 or later"


@add(
    "megatron.core.parallel_state:get_expert_tensor_parallel_world_size",
    feature=VERL_ON_MEGATRON_CORE,
    why=_WHY,
    upstream=_UPSTREAM,
    remove_when=_REMOVE_WHEN,
    evidence="executed",
)
def expert_tensor_parallel_world_size(module: ModuleType) -> Callable[[], int]:
    return module.get_tensor_model_parallel_world_size


@add(
    "megatron.core.parallel_state:get_expert_tensor_parallel_rank",
    feature=VERL_ON_MEGATRON_CORE,
    why=_WHY,
    upstream=_UPSTREAM,
    remove_when=_REMOVE_WHEN,
    evidence="executed",
)
def expert_tensor_parallel_rank(module: ModuleType) -> Callable[[], int]:
    return module.get_tensor_model_parallel_rank


@add(
    "megatron.core.parallel_state:get_expert_tensor_parallel_group",
    feature=VERL_ON_MEGATRON_CORE,
    why=_WHY,
    upstream=_UPSTREAM,
    remove_when=_REMOVE_WHEN,
    evidence="executed",
)
def expert_tensor_parallel_group(module: ModuleType) -> Callable[..., ProcessGroup]:
    return module.get_tensor_model_parallel_group


@wrap(
    "megatron.core.parallel_state:initialize_model_parallel",
    feature=VERL_ON_MEGATRON_CORE,
    why="verl 0.4.0 passes expert_tensor_parallel_size, which megatron-core 0.8.0 does not take",
    upstream=_UPSTREAM,
    remove_when=_REMOVE_WHEN,
    evidence="executed",
)
def initialize_model_parallel(
    upstream: Callable[..., None],
    tensor_model_parallel_size: int = 1,
    *args: Any,
    expert_tensor_parallel_size: int | None = None,
    **kwargs: Any,
) -> None:
    if expert_tensor_parallel_size not in (None, tensor_model_parallel_size):
        raise ValueError(
            f"expert_tensor_parallel_size={expert_tensor_parallel_size} is invalid: megatron-core 0.8.0 has no "
            "separate expert tensor parallel group. Leave it empty or set it to the tensor parallel size "
            f"({tensor_model_parallel_size})"
        )
    return upstream(tensor_model_parallel_size, *args, **kwargs)
