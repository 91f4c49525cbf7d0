"""Before the first transfer, every rank agrees on the same result, or all raise the same error.

The ranks are threads here, and a collective is a board that all of them write to before any reads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from post_training.layouts.layout import PADDING, Shard
from post_training.reshard import agreement
from post_training.reshard.overlaps import LayoutError

RANKS = 3


class Rank:
    """A stand-in for the process group, as seen by one rank."""

    def __init__(self, number: int, barrier: Barrier, board: list) -> None:
        self.number, self.barrier, self.board, self.collectives = number, barrier, board, 0


def gather(gathered: list, value: object, group: Rank) -> None:
    group.collectives += 1
    group.board[group.number] = value
    group.barrier.wait(30)
    gathered[:] = group.board if len(gathered) == len(group.board) else pytest.fail("a place for every rank")
    group.barrier.wait(30)


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    ranks = SimpleNamespace(
        get_rank=lambda group: group.number, get_world_size=lambda group: RANKS, all_gather_object=gather
    )
    monkeypatch.setattr(agreement, "dist", ranks)


def on_all_ranks(call) -> tuple[list, list[int]]:
    """Call on all ranks. Return each rank's result, or its LayoutError as text, and its number of collectives."""
    barrier, board = Barrier(RANKS), [None] * RANKS
    groups = [Rank(number, barrier, board) for number in range(RANKS)]

    def one(group: Rank) -> object:
        try:
            return call(group)
        except LayoutError as error:
            return str(error)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, groups)), [group.collectives for group in groups]


def shard(name: str, size: int = 2) -> Shard:
    return Shard(name, ((0, size),), f"local.{name}")


# Weights by rank. First side: "a" on all, "b" on the last two, "c" on the last. Second side: "a" on the first.
LAYOUTS = (
    [[shard("a")], [shard("a"), shard("b")], [shard("b"), shard("c"), shard("a")]],
    [[shard("a")], [], [Shard(PADDING, ((0, 2),), "local.padding")]],
)


def tensors(rank: int, side: int, **changed: torch.Tensor) -> dict[str, torch.Tensor]:
    kinds = {"local.a": torch.float32, "local.b": torch.bfloat16, "local.c": torch.float16, "local.padding": torch.int8}
    held = {each.local: torch.zeros(2, dtype=kinds[each.local]) for each in LAYOUTS[side][rank]}
    return held | {f"local.{name}": value for name, value in changed.items()}


def own_side(rank: int, held: dict[str, torch.Tensor], side: int = 0) -> agreement.OwnSide:
    return agreement.OwnSide.of(held, LAYOUTS[side], rank)


def test_every_rank_learns_the_type_of_every_tensor_of_each_side():
    found, collectives = on_all_ranks(
        lambda group: agreement.agree_on_types(
            [own_side(group.number, tensors(group.number, side), side) for side in (0, 1)], group
        )
    )
    types = [{"a": torch.float32, "b": torch.bfloat16, "c": torch.float16}, {"a": torch.float32}]
    assert found == [types] * RANKS and collectives == [2] * RANKS


@pytest.mark.parametrize(
    "rank, changed, sentence",
    [
        (1, {"b": torch.zeros(3, dtype=torch.bfloat16)}, "rank 1: "),
        (2, {"b": torch.zeros(2, dtype=torch.float32)}, "b: rank 2 has torch.float32, but a lower rank torch.bfloat16"),
        (
            2,
            {"a": torch.zeros(2, dtype=torch.float64)},
            "a: rank 2 has torch.float64, but a lower rank torch.float32",
        ),
    ],
)
def test_tensors_of_one_rank_that_do_not_fit_stop_all(rank, changed, sentence):
    found, _ = on_all_ranks(
        lambda group: agreement.agree_on_types(
            [own_side(group.number, tensors(group.number, 0, **(changed if group.number == rank else {})))], group
        )
    )
    assert len(set(map(str, found))) == 1 and found[0].startswith(sentence), found


def test_a_tensor_that_a_rank_lacks_stops_all():
    found, _ = on_all_ranks(
        lambda group: agreement.agree_on_types(
            [own_side(group.number, {} if group.number == 0 else tensors(group.number, 0))], group
        )
    )
    assert len(set(map(str, found))) == 1 and found[0].startswith("rank 0: ") and "local.a" in found[0]


@pytest.mark.parametrize("digests, different", [("xxx", None), ("xyx", [1]), ("yxx", [0]), ("xxy", [2])])
def test_the_rank_that_planned_something_else_is_named_on_all(digests, different):
    found, collectives = on_all_ranks(lambda group: agreement.agree_on_plan(digests[group.number], group))
    assert collectives == [1] * RANKS and len(set(found)) == 1
    assert (
        found[0] is None if different is None else found[0].startswith(f"ranks {different} made another reshard plan")
    )
