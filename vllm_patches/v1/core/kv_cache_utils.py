"""vLLM obeys the configured number of KV cache blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.compatibility.feature import KV_CACHE_SIZE

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@wrap(
    "vllm.v1.core.kv_cache_utils:get_num_blocks",
    feature=KV_CACHE_SIZE,
    evidence="executed",
    why="vLLM 0.9.1 logs num_gpu_blocks_override and then ignores it; a cache that fills the device is cleared for "
    "every rollout",
    upstream="https://github.com/vllm-project/vllm/pull/19503",
    remove_when="the pinned vLLM returns the override",
)
def get_num_blocks(upstream: Callable[..., int], vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> int:
    return min(upstream(vllm_config, *args, **kwargs), vllm_config.cache_config.num_gpu_blocks_override)
