"""Patches of verl's FSDP2 functions, which are written for CUDA and torch 2.6, for an NPU with the pinned torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from overlay import replace, wrap
from verl_patches.features.compatibility.feature import FULLY_SHARDED

if TYPE_CHECKING:
    import torch

_UTILS = "verl.utils.fsdp_utils"
_FSDP2 = "https://github.com/verl-project/verl/pull/1026"


@wrap(
    f"{_UTILS}:apply_fsdp2",
    feature=FULLY_SHARDED,
    why="the pinned torch looks for FSDP2's streams in torch.cuda, and verl asks torch.cuda for its device",
    upstream=_FSDP2,
    remove_when="the pinned torch and verl ask the NPU",
)
def apply_fsdp2(upstream: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    from verl_patches.features.compatibility.fully_sharded import prepare

    prepare()
    upstream(*args, **kwargs)


@replace(
    f"{_UTILS}:fsdp2_clip_grad_norm_",
    feature=FULLY_SHARDED,
    why="verl imports functions that torch has since 2.6, and reports the norm of one rank's shard",
    upstream=_FSDP2,
    remove_when="the pinned torch has them, and verl takes the norm over all ranks",
)
def clip_gradients_to_norm(
    parameters: torch.Tensor | Iterable[torch.nn.Parameter], max_norm: float, *args: Any, **options: Any
) -> torch.Tensor:
    from verl_patches.features.compatibility.fully_sharded import clip_gradients

    return clip_gradients(parameters, max_norm, *args, **options)


@wrap(
    f"{_UTILS}:offload_fsdp2_model_to_cpu",
    feature=FULLY_SHARDED,
    why="verl sets the data of each DTensor, which moves none of its memory",
    upstream=_FSDP2,
    remove_when="verl moves the model",
)
def offload_model(upstream: Callable[..., None], model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    model.cpu()
    upstream(model, *args, **kwargs)


@wrap(
    f"{_UTILS}:load_fsdp2_model_to_gpu",
    feature=FULLY_SHARDED,
    why="see offload_fsdp2_model_to_cpu",
    upstream=_FSDP2,
    remove_when="verl moves the model",
)
def load_model(upstream: Callable[..., None], model: torch.nn.Module) -> None:
    from verl.utils.device import get_device_name

    model.to(get_device_name())
    upstream(model)
