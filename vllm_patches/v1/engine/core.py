"""vLLM's engine core follows the sync window of its decode loop, between which requests may migrate."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.dp_sync.feature import DP_SYNC
from verl_patches.features.rollout_rebalance.feature import ROLLOUT_REBALANCE

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore


@wrap(
    "vllm.v1.engine.core:EngineCore.step",
    why="within a window no request is admitted or preempted; blocks are reserved before it, and a step that schedules "
    "nothing must still make the forward that the other ranks make",
    relies_on=["vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots"],
    feature=DP_SYNC,
    evidence="executed",
    upstream="not forwarded: part of this project's features",
    remove_when="vLLM's data-parallel engines agree once for several decode steps",
)
def step(
    upstream: Callable[..., tuple[dict[int, EngineCoreOutputs], bool]], self: EngineCore
) -> tuple[dict[int, EngineCoreOutputs], bool]:
    from verl_patches.features.dp_sync import decode_loop

    loop = decode_loop.going()
    return loop.step(self, lambda: upstream(self)) if loop else upstream(self)


@wrap(
    "vllm.v1.engine.core:EngineCore.execute_dummy_batch",
    why="an engine without requests agrees before its forward, which no engine makes once all have finished",
    feature=DP_SYNC,
    evidence="executed",
    upstream="not forwarded: part of this project's features",
    remove_when="vLLM's data-parallel engines agree once for several decode steps",
)
def execute_dummy_batch(upstream: Callable[..., None], self: EngineCore) -> None:
    from verl_patches.features.dp_sync import decode_loop

    loop = decode_loop.going()
    if loop:
        loop.idle_step(lambda: upstream(self), self.scheduler)
    else:
        upstream(self)


@wrap(
    "vllm.v1.engine.core:EngineCore.step",
    why="between windows requests move to engines with room; their sampled tokens return to their home engine, which "
    "merges the results",
    feature=ROLLOUT_REBALANCE,
    outside=["dp_sync"],
    upstream="not forwarded: part of this project's features",
    remove_when="vLLM moves requests between data-parallel engines while they decode",
)
def step_between_moves(
    upstream: Callable[..., tuple[dict[int, EngineCoreOutputs], bool]], self: EngineCore
) -> tuple[dict[int, EngineCoreOutputs], bool]:
    from verl_patches.features.dp_sync import decode_loop
    from verl_patches.features.rollout_rebalance.migration import migration_of

    loop = decode_loop.going()
    if not loop:
        return upstream(self)
    with migration_of(loop) as migration:
        migration.move(self)
        with migration.stepping():
            outputs, executed = upstream(self)
        return migration.own_outputs(self, outputs), executed


@wrap(
    "vllm.v1.engine.core:EngineCore.execute_dummy_batch",
    why="an engine without its own requests may have those of others, for which it makes a step",
    feature=ROLLOUT_REBALANCE,
    outside=["dp_sync"],
    upstream="not forwarded: part of this project's features",
    remove_when="vLLM moves requests between data-parallel engines while they decode",
)
def step_for_migrated_requests(upstream: Callable[..., None], self: EngineCore) -> None:
    from verl_patches.features.dp_sync import decode_loop
    from verl_patches.features.rollout_rebalance.migration import migration_of

    loop = decode_loop.going()
    if not loop:
        return upstream(self)
    with migration_of(loop) as migration:
        migration.move(self)
        if migration.has_work(self):
            self.step()
        else:
            upstream(self)
