"""The report of the first element that differs between two checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from post_training.checkpoint import comparison
from post_training.checkpoint.comparison import Difference, _difference, compared_bytes, first_difference
from post_training.checkpoint.source import Fragment, HFTensor, Source

NAME = "model.norm.weight"


@dataclass(frozen=True)
class Stored:
    """A stand-in for a region of a file."""

    values: torch.Tensor

    @property
    def dtype(self):
        return self.values.dtype

    def part(self, bounds):
        return Stored(self.values[tuple(slice(start, stop) for start, stop in bounds)])

    def read(self):
        return self.values if self.values.dim() == 2 else self.values.unsqueeze(0)


def source(name, values, *cuts, replicas=()):
    """Make a checkpoint of one tensor, split before the rows `cuts`; `replicas` are further copies of the whole."""
    edges = [0, *cuts, len(values)]
    rows = [(start, stop) for start, stop in zip(edges, edges[1:], strict=False)]
    slices = [((start, stop), *((0, size) for size in values.shape[1:])) for start, stop in rows]
    parts = [
        Fragment(bounds, Stored(values[start:stop]), f"{name}{start}")
        for bounds, (start, stop) in zip(slices, rows, strict=True)
    ]
    whole = tuple((0, size) for size in values.shape)
    parts += [Fragment(whole, Stored(copy), f"{name} again") for copy in replicas]
    return Source(name, [HFTensor(NAME, tuple(values.shape), parts)])


def difference(left, right):
    found = _difference(left, right, NAME, lambda count: None)
    return found and str(found)


@pytest.mark.parametrize("slab", [1, 4, 1000])
def test_the_first_element_is_named_with_both_values_and_both_files(monkeypatch, slab):
    monkeypatch.setattr(comparison, "_SLAB_ELEMENTS", slab)
    values = torch.arange(12.0).view(4, 3)
    other = values.clone()
    other[3, 0], other[2, 1] = -1, -2
    left, right = source("a", values, 1), source("b", other, 2)
    assert difference(left, right) == f"{NAME}: [2, 1] is 7.0 in a1 and -2.0 in b2"
    assert difference(right, left) == f"{NAME}: [2, 1] is -2.0 in b2 and 7.0 in a1"
    assert difference(left, source("c", values, 3)) is None


def test_a_vector_has_one_index_and_bits_count():
    values = torch.tensor([1.0, 0.0, 2.0])
    assert difference(source("a", values), source("b", -values * 0 + values, 2)) is None
    zero = torch.tensor([1.0, -0.0, 2.0])
    assert difference(source("a", values), source("b", zero)) == f"{NAME}: [1] is 0.0 in a0 and -0.0 in b0"


def test_a_replica_that_is_not_like_the_others_is_found_on_either_side():
    values = torch.arange(6.0).view(2, 3)
    torn = values.clone()
    torn[1, 2] = 9
    sound, doubted = source("a", values), source("b", values, replicas=[values, torn])
    assert difference(doubted, sound) == f"{NAME}: [1, 2] is 9.0 in b again and 5.0 in a0"
    assert difference(sound, doubted) == f"{NAME}: [1, 2] is 5.0 in a0 and 9.0 in b again"
    assert compared_bytes(sound, sound, [NAME]) == 24 and compared_bytes(doubted, sound, [NAME]) == 72
    assert compared_bytes(sound, doubted, [NAME]) == 24 + 48


def test_shapes_and_dtypes_that_differ_are_said():
    values = torch.ones(2, 3)
    said = f"{NAME}: torch.float32 (2, 3) in a, torch.float32 (3, 2) in b"
    assert difference(source("a", values), source("b", values.t().contiguous())) == said
    said = f"{NAME}: torch.float32 (2, 3) in a, torch.bfloat16 (2, 3) in b"
    assert difference(source("a", values), source("b", values.bfloat16())) == said


@pytest.mark.parametrize("order", [(2, 3, 0, 1), (3, 1, 0, 2), (0, 1, 2, 3), (3, 2, 1, 0)])
def test_first_tensor_named_whatever_process_ends_first(monkeypatch, order):
    """Processes end in any order, and the report must not depend on it."""
    names = ["a", "b", "c", "d"]
    differences = {1: Difference("b", "differs"), 3: Difference("d", "differs")}

    def run_tasks(task, arguments, workers, bar):
        assert list(arguments) == [0, 1, 2, 3]
        yield from ((index, differences.get(index)) for index in order)

    monkeypatch.setattr(comparison, "run_tasks", run_tasks)
    left = source("left", torch.ones(1))
    assert first_difference(left, left, names, 2, None) == differences[1]
    differences.clear()
    assert first_difference(left, left, names, 2, None) is None
