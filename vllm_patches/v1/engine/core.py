"""vLLM's engine core keeps to the lease of its decode loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.dp_sync.feature import DP_SYNC

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore

_METADATA = {
    "feature": DP_SYNC,
    "evidence": "executed",
    "upstream": "not forwarded: part of this project's features",
    "remove_when": "vLLM's data-parallel engines agree once for several decode steps",
}


@wrap(
    "vllm.v1.engine.core:EngineCore.step",
    why="within a lease no request is admitted or preempted; blocks are reserved before it, and a step that schedules "
    "nothing must still make the forward that the other ranks make",
    relies_on=["vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots"],
    **_METADATA,
)
def step(
    upstream: Callable[..., tuple[dict[int, EngineCoreOutputs], bool]], self: EngineCore
) -> tuple[dict[int, EngineCoreOutputs], bool]:
    from verl_patches.features.dp_sync import decode_loop

    loop = decode_loop.going()
    return loop.step(self, lambda: upstream(self)) if loop else upstream(self)


@wrap(
    "vllm.v1.engine.core:EngineCore.execute_dummy_batch",
    why="an engine without requests agrees before its forward, which nobody makes where all have finished",
    **_METADATA,
)
def execute_dummy_batch(upstream: Callable[..., None], self: EngineCore) -> None:
    from verl_patches.features.dp_sync import decode_loop

    loop = decode_loop.going()
    if loop:
        loop.idle_step(lambda: upstream(self))
    else:
        upstream(self)
