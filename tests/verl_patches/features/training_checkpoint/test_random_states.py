"""A worker's random numbers after a resume: each source continues with the numbers that it would have drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch_npu  # noqa: F401

from verl_patches.features.training_checkpoint.random_states import random_states, restore_random_states

SOURCES: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "device": lambda: torch.rand(3, device="npu").tolist(),
    "Python": lambda: [random.random() for _ in range(3)],
    # These draw two numbers at a time and keep the second for the next call.
    "Python, normal": lambda: random.gauss(),
    "NumPy": lambda: numpy.random.rand(3).tolist(),
    "NumPy, normal": lambda: numpy.random.standard_normal(),
}


def seed_all(seed: int) -> None:
    """Seed every source; `torch.manual_seed` seeds the device too."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_each_source_continues_from_its_place(source, before):
    draw = SOURCES[source]
    # Not the seed below, at which another test of this process may have left the sources.
    seed_all(3)
    for _ in range(before):
        draw()
    tensors, texts = random_states({})
    expected = [draw() for _ in range(3)]
    seed_all(7)
    assert [draw() for _ in range(3)] != expected
    restore_random_states(tensors, texts, lambda tracked: None)
    assert [draw() for _ in range(3)] == expected


def test_states_of_megatrons_tracker_come_back_by_name():
    tracked = {"model-parallel-rng": torch.arange(4), "expert-parallel-rng": torch.arange(5)}
    found: dict[str, torch.Tensor] = {}
    restore_random_states(*random_states(tracked), found.update)
    assert found.keys() == tracked.keys() and all(found[name] is tracked[name] for name in tracked)
