"""vLLM registers its custom operators on torch 2.5.1, and patches the processes that it spawns."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from overlay import register, wrap
from verl_patches.features.compatibility.feature import VLLM_ON_TORCH, VLLM_PROCESSES

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext


@register(
    "torch._library.infer_schema:SUPPORTED_PARAM_TYPES",
    feature=VLLM_ON_TORCH,
    why="vllm.utils.direct_register_custom_op has torch infer schemas, and torch 2.5.1 does not know list[int]",
    upstream="https://github.com/pytorch/pytorch/issues/146594",
    remove_when="the pinned torch is 2.7 or later, which vLLM 0.9.1 is written for",
    evidence="executed",
)
def parameter_types(module: ModuleType) -> dict[Any, str]:
    # vLLM-Ascend rewrites the annotations instead, but only once its plugin is loaded, and verl's driver imports vLLM's
    # operators before that.
    return {list[int]: "SymInt[]", list[int] | None: "SymInt[]?"}


@wrap(
    "vllm.utils:get_mp_context",
    feature=VLLM_PROCESSES,
    why="engine cores and workers come from this context; a forked one is a copy of its patched parent, but a spawned "
    "one starts empty",
    upstream="not forwarded: vLLM's plugins are loaded only after vLLM itself, which is too late on torch 2.5.1",
    remove_when="never: it is how the overlay reaches these processes",
)
def get_mp_context(upstream: Callable[..., BaseContext]) -> BaseContext:
    context = upstream()
    if context.get_start_method() != "spawn":
        return context
    from vllm_patches.spawned_process import PatchedSpawnContext

    return PatchedSpawnContext()
