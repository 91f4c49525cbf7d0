"""Handing the models of one process to its `Residency`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl_patches.features.residency.absorbed import absorbed_tensors
from verl_patches.features.residency.holdings import gradient_tensors, optimizer_tensors, parameter_tensors
from verl_patches.features.residency.kv_cache import KvCache
from verl_patches.features.residency.phases import Residency
from verl_patches.features.residency.storages import StorageGroup


def register_actor(residency: Residency, chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """The training model's weights, gradients and optimizer.

    Gradients come back as zeros: the update begins with zeroing them. In float32 the optimizer's main parameters are
    views of the weights and belong to those.
    """

    def weights() -> Any:
        return parameter_tensors(chunks)

    residency.register("actor_params", StorageGroup(weights))
    residency.register("actor_grads", StorageGroup(lambda: gradient_tensors(chunks), "zeroed"))
    if optimizer is not None:

        def not_optimizers() -> Any:
            return [*parameter_tensors(chunks), *gradient_tensors(chunks)]

        state = StorageGroup(lambda: optimizer_tensors(optimizer), excluding=not_optimizers)
        residency.register("optimizer", state)


def register_reference(residency: Residency, chunks: Sequence[torch.nn.Module]) -> None:
    """The reference policy's weights."""
    residency.register("ref_params", StorageGroup(lambda: parameter_tensors(chunks)))


def register_rollout(residency: Residency, runner: Any) -> None:
    """The weights and the KV cache of a vLLM-Ascend model runner whose cache exists.

    MLA's absorbed weights are derived again after every reshard, so their contents are not copied.
    """
    model = runner.get_model()
    residency.register("rollout_weights", StorageGroup(lambda: parameter_tensors([model])))
    residency.register("rollout_weights", StorageGroup(lambda: absorbed_tensors(model), "rebuilt"))
    residency.register("kv_cache", KvCache(runner))
