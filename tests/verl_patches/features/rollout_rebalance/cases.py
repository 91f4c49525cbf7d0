"""The cases that `engine_program` runs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

MODEL, WINDOW, SEQUENCES = "deepseek8", 4, 8
LONG = [100, 84, 70, 60, 50, 40, 30, 24]
STOP_TOKEN = 7
PART = 12


@dataclass(frozen=True)
class Case:
    """Engines of `tensor_parallel` ranks each, and the runs that they generate one after another.

    Attributes:
        ranks: number of ranks.
        sizes: batch sizes of the graphs.
        runs: names of the runs.
        tensor_parallel: ranks of an engine.
        part: the most tokens of a prompt in one forward if prompts are cut; 0 does not cut them.
        blocks: number of KV cache blocks.
        longest: length of the longest sequence, in tokens.
    """

    ranks: int
    sizes: tuple[int, ...]
    runs: tuple[str, ...]
    tensor_parallel: int = 1
    part: int = 0
    blocks: int = 64
    longest: int = 160


EVERY = ("greedy off", "greedy on", "seeded off", "seeded on")
# All requests have seeds, as from the driver, and are dealt to the engines by length or in their order.
DEALT = ("dealt off", "dealt on", "placed off", "placed on")
CASES = {
    "one size": Case(2, (8,), ("greedy off", "seeded off")),
    "two": Case(2, (1, 2, 4, 8), (*EVERY, "seeded on: drawn anew", "greedy on: nothing comes home")),
    "four": Case(4, (1, 2, 4, 8), EVERY),
    "by length": Case(4, (1, 2, 4, 8), (*DEALT, "placed off: seeds by place")),
    "eight": Case(8, (1, 2, 4, 8), (*EVERY, *DEALT)),
    "tensor parallel": Case(4, (2, 4, 8), EVERY, tensor_parallel=2),
    "cut": Case(
        2, (1, 2, 4, 8), (*EVERY, "seeded off: a part draws", "seeded on: the device's numbers go on"), part=PART
    ),
}


# Eight sequences of two blocks each, of which the cache holds four; keyed by how the engines agree on forwards.
AGREED = {"upstream": {"enabled": False}, "every": {"lease_steps": 1}, "windowed": {"lease_steps": 16}}
_PREEMPTING = tuple(f"{kind} {how}" for kind in ("long", "drawn") for how in AGREED)
CASES |= {
    "preempts, four": Case(4, (SEQUENCES,), _PREEMPTING, blocks=10, longest=256),
    "preempts, eight": Case(8, (SEQUENCES,), _PREEMPTING, blocks=10, longest=256),
}


def draw_for_parts(runner: Any, scheduled: dict[str, int]) -> None:
    """A faulty `give_generators`: a part of a prompt leaves a draw behind, which vLLM-Ascend undoes incompletely."""
    import torch

    for request_id, number in scheduled.items():
        state = runner.requests[request_id]
        if state.num_computed_tokens + number < state.num_tokens:
            runner.input_batch.generators.pop(runner.input_batch.req_id_to_index[request_id], None)
            if state.generator is not None:
                torch.empty(1, device="npu").exponential_(generator=state.generator)
        elif state.generator is not None:
            runner.input_batch.generators[runner.input_batch.req_id_to_index[request_id]] = state.generator


def seed_places(order: list[int]) -> list[int]:
    """Return which seed each request has, of those drawn in the requests' original order; they are dealt in `order`."""
    return order


FAULTS: dict[str, tuple[str, Any]] = {
    "seeds by place": (f"{__name__}.seed_places", sorted),
    "drawn anew": (
        "verl_patches.features.rollout_rebalance.migration.restore_generators",
        lambda runner, scheduled: None,
    ),
    "a part draws": ("verl_patches.features.request_noise.generators.give_generators", draw_for_parts),
    "the device's numbers go on": (
        "verl_patches.features.request_noise.generators.parts_leave_no_trace",
        contextlib.nullcontext,
    ),
    "nothing comes home": (
        "verl_patches.features.rollout_rebalance.migration.RequestMigration.ended",
        lambda migration: None,
    ),
}


def lengths_of(engine: int, engines: int, kind: str = "") -> list[int]:
    """Return a long tail: only the last engine has long answers. For "long" and "drawn", all engines do."""
    if kind in ("long", "drawn"):
        return [225 - 2 * number - engine for number in range(SEQUENCES)]
    return LONG if engine == engines - 1 else [3 + number // 2 for number in range(SEQUENCES)]
