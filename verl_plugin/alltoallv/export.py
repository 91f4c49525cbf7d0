"""Methods for verl's training engines that hand weights over by alltoallv instead of as whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from verl.utils.device import get_device_id, get_device_name

from post_training.device_phases import PhaseMemory
from post_training.reshard.handover import HandoverError
from verl_plugin.alltoallv.addresses import control_path
from verl_plugin.alltoallv.settings import LIBRARY, LIBRARY_KEY
from verl_plugin.alltoallv.transfer import Training, WeightTransfer, ray_job

_REMEDY = f"Set it otherwise, or remove {LIBRARY} from {LIBRARY_KEY}."


class OfferedWeights:
    """Weights as `get_per_tensor_param` returns them.

    Iterating runs an update for the worker on this die, as verl's hand-over does if training and rollout share dies.
    The checkpoint engine does not iterate: it calls `training`.

    Attributes:
        training: returns the engine's tensors and shards.
    """

    def __init__(
        self, training: Callable[[], Training], for_own_die: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    ) -> None:
        self.training = training
        self._for_own_die = for_own_die

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._for_own_die()


class AlltoallvExport:
    """Mixin for a verl engine. A subclass returns its rank's tensors and shards from `_training`."""

    model_config: Any
    _qat_enabled: bool
    _transfer: WeightTransfer | None = None

    def get_per_tensor_param(self, **_: Any) -> tuple[OfferedWeights, None]:
        """Offer the weights to the worker on this die or to a checkpoint engine; stock verl returns tensors whole."""
        _reject_adapters(self.model_config, getattr(self, "_qat_enabled", False))
        return OfferedWeights(self._training, self._buckets), None

    def rollout_memory(self) -> dict[str, PhaseMemory]:
        """Return the rollouts' device memory since the last call, by phase; empty before the first update."""
        return {} if self._transfer is None else self._transfer.rollout_memory()

    def _buckets(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buckets that the vLLM worker on this die serves."""
        if self._transfer is None:
            device = torch.device(get_device_name(), get_device_id())
            worker = control_path(ray_job(), dist.get_rank())
            self._transfer = WeightTransfer(self._training(), worker, dist.group.WORLD, device)
        yield from self._transfer.buckets()

    def _training(self) -> Training:
        raise NotImplementedError


def _reject_adapters(model_config: Any, quantized: bool) -> None:
    """Raise HandoverError, on all ranks alike, for adapters and quantized weights, which no layout describes."""
    rank = max(model_config.lora_rank, model_config.lora.get("rank", 0))
    if rank > 0:
        key = "actor_rollout_ref.model.lora_rank"
        raise HandoverError(f"{key}={rank} is invalid: alltoallv does not move LoRA adapters. {_REMEDY}")
    if quantized:
        key = "actor_rollout_ref.actor.qat.enable"
        raise HandoverError(f"{key}=true is invalid: alltoallv does not move quantized weights. {_REMEDY}")
