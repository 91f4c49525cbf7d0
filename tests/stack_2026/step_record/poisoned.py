"""A module for `actor_rollout_ref.model.external_lib` that makes a layer's gradients non-finite on the last rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from verl_plugin.engines import extend_engine

LAYER = "model.layers.1.mlp.up_proj"


class Overflows(torch.autograd.Function):
    """A function whose gradient overflows its dtype."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2.0**120 * 2.0**120


class Poisoned:
    def initialize(self) -> None:
        super().initialize()  # type: ignore[misc]  # of the engine that this extends
        if dist.get_rank() == dist.get_world_size() - 1:
            layer = self.module.get_submodule(LAYER)  # type: ignore[attr-defined]  # of the engine
            layer.register_forward_hook(lambda module, inputs, output: Overflows.apply(output))


extend_engine("fsdp2", Poisoned)
