"""Registers the models of one process with its `Residency`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from post_training.layouts.model_tensors import rollout_tensors
from post_training.live_tensors import gradient_tensors, optimizer_tensors, parameter_tensors
from post_training.reshard.generation import WeightsGeneration
from post_training.reshard.mla_refresh import absorbed_tensors
from verl_patches.features.reshard.generation import process_generation
from verl_patches.features.residency.kv_cache import KvCache
from verl_patches.features.residency.phases import Residency
from verl_patches.features.residency.reserved import RESERVED, ReservedGroup
from verl_patches.features.residency.storages import Resident, StorageGroup


def register_actor(residency: Residency, chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Register the training model's weights, gradients and optimizer."""
    _register_trained(residency, chunks, optimizer, "actor", "optimizer")


def register_critic(residency: Residency, chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Register the critic's weights, gradients and optimizer."""
    _register_trained(residency, chunks, optimizer, "critic", "critic_optimizer")


def _register_trained(
    residency: Residency, chunks: Sequence[torch.nn.Module], optimizer: Any, name: str, optimizers: str
) -> None:
    """Register a trained model's groups.

    Gradients come back as zeros, because the update begins by zeroing them. In float32 the optimizer's main parameters
    are views of the weights and belong to their group.
    """

    def weights() -> Any:
        return parameter_tensors(chunks)

    residency.register(f"{name}_params", StorageGroup(weights))
    residency.register(f"{name}_grads", StorageGroup(lambda: gradient_tensors(chunks), "zeroed"))
    if optimizer is not None:

        def not_optimizers() -> Any:
            return [*parameter_tensors(chunks), *gradient_tensors(chunks)]

        state = StorageGroup(lambda: optimizer_tensors(optimizer), excluding=not_optimizers)
        residency.register(optimizers, state)


def register_reference(residency: Residency, chunks: Sequence[torch.nn.Module]) -> None:
    """Register the reference policy's weights."""
    residency.register("ref_params", StorageGroup(lambda: parameter_tensors(chunks)))


def register_rollout(residency: Residency, runner: Any, rewritten: Sequence[torch.Tensor] = ()) -> None:
    """Register the weights and the KV cache of a vLLM-Ascend model runner whose cache exists.

    Buffers that are no weights, such as rotary tables, are constants. Weights that the runner's adapter has put into
    reserved memory keep their addresses.

    Args:
        residency: the offload manager of this process.
        runner: the model runner.
        rewritten: weights that every reshard writes completely. They leave without a copy, and from then on the rollout
            has no weights (`process_generation`) until a reshard has succeeded. MLA's absorbed weights are derived
            again after it.
    """
    reserved = vars(runner).get(RESERVED)
    model = runner.get_model()

    def weights() -> Any:
        return rollout_tensors(model).values()

    own = reserved is None
    parts: list[Resident] = [
        StorageGroup(weights, excluding=lambda: rewritten, gives_back=own),
        Constants(model.buffers, excluding=weights, gives_back=own),
        StorageGroup(lambda: absorbed_tensors(model), "rebuilt", gives_back=own),
    ]
    if rewritten:
        parts.append(GivenUpWeights(rewritten, process_generation(), gives_back=own))
    residents: list[Resident] = parts if own else [ReservedGroup(reserved, parts)]
    for resident in residents:
        residency.register("rollout_weights", resident)
    residency.register("kv_cache", KvCache(runner))


class Constants(StorageGroup):
    """Tensors that no phase writes, even if it writes others of their group."""

    def offload(self, changed: bool = True) -> int:
        """Give the memory back; the contents are copied only once in the life of a process."""
        return super().offload(changed=False)


class GivenUpWeights(StorageGroup):
    """Weights that leave without a copy, because nobody may use them before they have been written again.

    So do weights that an engine has loaded itself: verl reshards before every generation, even the first.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], generation: WeightsGeneration, gives_back: bool = True):
        super().__init__(lambda: tensors, "rebuilt", gives_back=gives_back)
        self._generation = generation

    def offload(self, changed: bool = True) -> int:
        """Give the memory back and mark the rollout as without weights. Nothing is copied."""
        self._generation.discard()
        return super().offload(changed)
