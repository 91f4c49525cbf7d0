"""A fault that verl's workers import as `external_lib`: the rollout receives the weights only once."""

from typing import Any

from verl.workers.sharding_manager.fsdp_vllm import FSDPVLLMShardingManager

_update_params = FSDPVLLMShardingManager.update_params


def update_once(self: FSDPVLLMShardingManager, *args: Any, **kwargs: Any) -> None:
    if not self.base_sync_done:
        _update_params(self, *args, **kwargs)


FSDPVLLMShardingManager.update_params = update_once
