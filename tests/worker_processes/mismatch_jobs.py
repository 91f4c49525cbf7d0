"""The same tokens through rollout and training of the worker processes, with one of six faults on one side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn

from post_training.mismatch.capture import capture_rollout, capture_training
from post_training.mismatch.dumps import Part, TokenSequence
from tests.worker_processes.jobs import State, phase

GROWTH = 1.05


def capture(
    state: State, sequences: Sequence[TokenSequence], fault: str | None = None, experts: tuple[int, int] = (0, 1)
) -> tuple[Part, Part]:
    """Return this rank's parts of rollout and training. `experts`: the two of rank 0 that a fault swaps."""
    worker = state["actor"]
    plant = ROLLOUT_FAULTS.get(fault or "", _none)
    generate = worker.rollout.generate_sequences

    def with_fault(**options: Any) -> Any:
        model = worker.rollout.inference_engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        with plant(model.model.layers, state["rank"], experts):
            return generate(**options)

    if fault == "stale layer":
        grow_weights(state)
    with mock.patch.object(worker.rollout, "generate_sequences", with_fault), torch.no_grad():
        rollout = capture_rollout(worker, sequences)
    with _no_temperature(state) if fault == "temperature" else nullcontext():
        return rollout, capture_training(worker, sequences)


def grow_weights(state: State) -> None:
    """Change the weights, which is all of an update that matters to a comparison of weights."""
    phase(state, "update")
    for chunk in state["actor"].actor_module:
        for parameter in chunk.parameters():
            parameter.data.mul_(GROWTH)


def _none(layers: nn.ModuleList, rank: int, experts: tuple[int, int]) -> Any:
    return nullcontext()


@contextmanager
def _stale_layer(layers: nn.ModuleList, rank: int, experts: tuple[int, int]) -> Iterator[None]:
    """Give layer 1 its weights from before the update; the next reshard brings the right ones."""
    for parameter in layers[1].parameters():
        parameter.data.div_(GROWTH)
    yield


@contextmanager
def _swapped_experts(layers: nn.ModuleList, rank: int, experts: tuple[int, int]) -> Iterator[None]:
    """Swap two experts of layer 2 on rank 0."""
    one, other = experts
    if rank == 0:
        for weight in (layers[2].mlp.experts.w13_weight, layers[2].mlp.experts.w2_weight):
            weight.data[[one, other]] = weight.data[[other, one]]
    yield


@contextmanager
def _rope_scaling(layers: nn.ModuleList, rank: int, experts: tuple[int, int]) -> Iterator[None]:
    """Halve the positions: a linear scaling of the rotary embedding that training does not have."""
    table = layers[0].self_attn.rotary_emb.cos_sin_cache
    right = table.clone()
    table.copy_(right[torch.arange(len(right)) // 2])
    yield
    table.copy_(right)


@contextmanager
def _norm_epsilon(layers: nn.ModuleList, rank: int, experts: tuple[int, int]) -> Iterator[None]:
    with mock.patch.object(layers[2].input_layernorm, "variance_epsilon", 1e-3):
        yield


@contextmanager
def _one_shard(layers: nn.ModuleList, rank: int, experts: tuple[int, int]) -> Iterator[None]:
    """Roll the columns of one tensor-parallel rank's shard of an output projection."""
    if rank == 1:
        weight = layers[1].self_attn.o_proj.weight
        weight.data.copy_(weight.data.roll(1, dims=-1))
    yield


@contextmanager
def _no_temperature(state: State) -> Iterator[None]:
    from tests.worker_processes.jobs import switch
    from verl_patches.features import settings

    before = settings.current()
    switch(state, temperature={"enabled": False})
    yield
    settings.activate(before)


ROLLOUT_FAULTS: dict[str, Callable[[nn.ModuleList, int, tuple[int, int]], Any]] = {
    "stale layer": _stale_layer,
    "swapped experts": _swapped_experts,
    "rope scaling": _rope_scaling,
    "norm epsilon": _norm_epsilon,
    "one TP shard": _one_shard,
}
