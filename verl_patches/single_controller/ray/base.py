"""Patch of verl's group of Ray workers: it puts each distinct part of a batch into Ray's store once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.shared_chunks.feature import SHARED_CHUNKS

if TYPE_CHECKING:
    from verl.single_controller.ray.base import RayWorkerGroup


@wrap(
    "verl.single_controller.ray.base:RayWorkerGroup.execute_all_async",
    feature=SHARED_CHUNKS,
    evidence="executed",
    relies_on=["verl.single_controller.base.decorator:dispatch_megatron_compute"],
    why="a part of a batch goes to all tensor- and pipeline-parallel ranks that share it, and is serialized for each "
    "of them in turn, so the last of many ranks starts a minute after the first",
    upstream="https://github.com/volcengine/verl/pull/1862",
    remove_when="the pinned verl is 0.4.0 or later, which puts each part of a training batch once",
)
def execute_all_async(
    upstream: Callable[..., list[Any]], self: RayWorkerGroup, method_name: str, *args: Any, **kwargs: Any
) -> list[Any]:
    import ray
    from verl import DataProto

    from verl_patches.features.shared_chunks.store import stored_once

    def is_chunk(element: Any) -> bool:
        return isinstance(element, DataProto)

    positional, named = stored_once(args, kwargs, len(self.workers), is_chunk, ray.put)
    return upstream(self, method_name, *positional, **named)
