"""Frees and recreates the KV cache of a vLLM-Ascend model runner."""

from __future__ import annotations

from typing import Any

import torch

# Attribute of the runner in which the adapter keeps the configuration of its cache.
CONFIGURATION = "overlay_kv_cache_config"


class KvCache:
    """The runner's KV cache as a resident that can leave the device.

    Its contents are dropped: they belong to finished requests and to weights that are about to change. Whoever frees
    the cache must therefore reset the prefix cache.

    Args:
        runner: vLLM-Ascend's `NPUModelRunner`, whose cache exists; `initialize_kv_cache` makes the same cache again.
    """

    unmapped_bytes = 0

    def __init__(self, runner: Any):
        self._runner = runner
        self._present = True

    def offload(self, changed: bool = True) -> int:
        """Drop the references that the runner and its attention layers hold to the cache. Nothing is copied."""
        if not self._present:
            return 0
        self._runner.kv_caches.clear()
        for layer in self._runner.vllm_config.compilation_config.static_forward_context.values():
            if hasattr(layer, "kv_cache"):
                layer.kv_cache = [torch.empty(0)]
        self._present = False
        return 0

    def onload(self) -> int:
        """Create the cache with the configuration that vLLM chose when it started. Nothing is copied."""
        if self._present:
            return 0
        self._runner.initialize_kv_cache(getattr(self._runner, CONFIGURATION))
        self._present = True
        return 0
