"""Offloads and reloads the parameters and gradients of verl's engine for Megatron-core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from verl_plugin.offload.manager import OffloadManager


class OffloadedMegatron(OffloadManager):
    """Trained parameters lie in buffers; verl frees the buffers' memory and keeps their copies on the host.

    A reference's parameters may leave only once for each return: docs/upstream/verl-megatron-offload-twice.md.
    """

    module: list[Any]
    _host: list[torch.Tensor] | None

    def _arrive(self) -> None:
        parameters = self._plain_parameters()
        if parameters and all(parameter.device.type == "cpu" for parameter in parameters):
            self._host = [parameter.data for parameter in parameters]

    @torch.no_grad()
    def _drop(self) -> bool:
        parameters, buffers = self._plain_parameters(), list(self._buffers())
        if parameters and self._host is None:
            return False
        if not all(hasattr(buffer.param_data, "cpu_data") for buffer in buffers):
            return False
        for parameter, host in zip(parameters, self._host or (), strict=True):
            parameter.data = host
        for buffer in buffers:
            buffer.param_data.untyped_storage().resize_(0)
        self._release_gradients()
        return True

    def _release_gradients(self) -> None:
        for buffer in self._buffers():
            if size := buffer.grad_data.storage().size():
                buffer.grad_data_size = size  # verl restores it to this size, with zeros
                buffer.grad_data.storage().resize_(0)

    def _buffers(self) -> Iterator[Any]:
        """Yield Megatron's buffers of trained parameters."""
        for chunk in self.module:
            if isinstance(chunk, DistributedDataParallel):
                yield from (*chunk.buffers, *chunk.expert_parallel_buffers)

    def _plain_parameters(self) -> list[Any]:
        """Return the parameters of a model that is not trained."""
        chunks = [chunk for chunk in self.module if not isinstance(chunk, DistributedDataParallel)]
        return [parameter for chunk in chunks for parameter in chunk.parameters()]
