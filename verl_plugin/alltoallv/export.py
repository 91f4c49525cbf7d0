"""The methods of verl's training engines by which they hand weights over by alltoallv instead of whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from verl.utils.device import get_device_id, get_device_name

from post_training.reshard.handover import HandoverError
from verl_plugin.alltoallv.settings import LIBRARY, LIBRARY_KEY
from verl_plugin.alltoallv.transfer import Training, WeightTransfer, ray_job

_REMEDY = f"Set it otherwise, or take {LIBRARY} out of {LIBRARY_KEY}."


class AlltoallvExport:
    """Extends an engine of verl. A subclass says in `_training` what its ranks hold."""

    model_config: Any
    _qat_enabled: bool
    _transfer: WeightTransfer | None = None

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """Return the buckets that the vLLM worker on this die serves, where stock verl returns every tensor whole."""
        if self._transfer is None:
            _reject_adapters(self.model_config, getattr(self, "_qat_enabled", False))
            device = torch.device(get_device_name(), get_device_id())
            self._transfer = WeightTransfer(self._training(), dist.group.WORLD, device, ray_job())
        return self._transfer.buckets(), None

    def _training(self) -> Training:
        raise NotImplementedError


def _reject_adapters(model_config: Any, quantized: bool) -> None:
    """Raise HandoverError for what the layouts do not describe; every rank finds the same."""
    rank = max(model_config.lora_rank, model_config.lora.get("rank", 0))
    if rank > 0:
        key = "actor_rollout_ref.model.lora_rank"
        raise HandoverError(f"{key}={rank} is invalid: LoRA adapters are not moved by alltoallv. {_REMEDY}")
    if quantized:
        key = "actor_rollout_ref.actor.qat.enable"
        raise HandoverError(f"{key}=true is invalid: quantized weights are not moved by alltoallv. {_REMEDY}")
