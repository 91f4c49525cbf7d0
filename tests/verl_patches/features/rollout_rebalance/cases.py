"""What `engine_program` runs."""

from __future__ import annotations

from dataclasses import dataclass

MODEL, LEASE, SEQUENCES = "deepseek8", 4, 8
LONG = [100, 84, 70, 60, 50, 40, 30, 24]
STOP_TOKEN = 7


@dataclass(frozen=True)
class Case:
    """Engines of `tensor_parallel` ranks each, whose graphs have these sizes, and what they generate in turn."""

    ranks: int
    sizes: tuple[int, ...]
    runs: tuple[str, ...]
    tensor_parallel: int = 1


EVERY = ("greedy off", "greedy on", "seeded off", "seeded on")
CASES = {
    "one size": Case(2, (8,), ("greedy off", "seeded off")),
    "two": Case(2, (1, 2, 4, 8), (*EVERY, "seeded on: drawn anew", "greedy on: nothing comes home")),
    "four": Case(4, (1, 2, 4, 8), EVERY),
    "tensor parallel": Case(4, (2, 4, 8), EVERY, tensor_parallel=2),
}
FAULTS = {
    "drawn anew": ("verl_patches.features.rollout_rebalance.mover.restore_generators", lambda runner, scheduled: None),
    "nothing comes home": ("verl_patches.features.rollout_rebalance.mover.Mover.ended", lambda mover: None),
}


def lengths_of(engine: int, engines: int) -> list[int]:
    """A long tail: the last engine has the long answers."""
    return LONG if engine == engines - 1 else [3 + number // 2 for number in range(SEQUENCES)]
