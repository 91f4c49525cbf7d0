"""Slices in a flat range of memory match plain indexing of numbered elements."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from post_training.checkpoint.flat_ranges import flat_parts
from post_training.layouts.layout import LocalView, Shard, TrainPlacement
from post_training.models import deepseek_v3
from tests.post_training.layouts.reference import SMALL

TABLE = deepseek_v3.table(SMALL)
SHARDS = [
    ((6, 4), Shard("whole", ((2, 8), (0, 4)), "w")),
    ((9,), Shard("vector", ((3, 12),), "w")),
    ((6, 4), Shard("rows", ((0, 2), (4, 8)), "w", LocalView(index=((3, 5),)))),
    ((6, 5), Shard("columns", ((0, 6), (1, 3)), "w", LocalView(index=((0, 6), (2, 4))))),
    ((5, 12), Shard("expert", ((0, 4), (0, 5)), "w", LocalView((5, 3, 4), ((0, 5), 1), True))),
    ((3, 20), Shard("turned", ((0, 5), (0, 4)), "w", LocalView((3, 4, 5), (2,), True))),
]


def numbered(shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def elements(shape, shard, start, stop):
    """Return the range's elements by their index in the HF tensor, from its parts."""
    stretch, found = numbered(shape).view(-1)[start:stop], {}
    for part in flat_parts(shape, shard, start, stop):
        values = part.of(stretch)
        assert tuple(values.shape) == tuple(b - a for a, b in part.bounds)
        for place in (
            torch.cartesian_prod(*(torch.arange(a, b) for a, b in part.bounds)).view(values.numel(), -1).tolist()
        ):
            inside = tuple(index - a for index, (a, _) in zip(place, part.bounds, strict=True))
            assert tuple(place) not in found, "twice"
            found[tuple(place)] = int(values[inside])
    return found


def expected(shape, shard, start, stop):
    view = shard.view.of(numbered(shape))
    corner = [a for a, _ in shard.bounds]
    return {
        tuple(a + index for a, index in zip(corner, place, strict=True)): int(view[place])
        for place in (tuple(row) for row in torch.ones_like(view).nonzero().tolist())
        if start <= int(view[place]) < stop
    }


@given(st.sampled_from(SHARDS), st.data())
def test_the_parts_of_any_stretch_are_the_elements_in_it(case, data):
    shape, shard = case
    total = torch.Size(shape).numel()
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    assert elements(shape, shard, start, stop) == expected(shape, shard, start, stop)
    assert len(list(flat_parts(shape, shard, start, stop))) <= 3


def test_stretches_that_tile_a_rank_tile_every_shard_of_its_layout():
    """Split each local tensor of a DeepSeek-V3 rank in the middle of rows, and check all shards."""
    placement = TrainPlacement(tp=2, pp=1, ep=2, dp=2, num_layer_list=(3,))
    for shard in TABLE.megatron(placement, 3):
        shape = SHAPES[shard.local]
        total = torch.Size(shape).numel()
        cuts = [0, total // 3 + 1, total // 2 + 1, total]
        together = {}
        for start, stop in zip(cuts, cuts[1:], strict=False):
            part = elements(shape, shard, start, stop)
            assert not together.keys() & part.keys()
            together |= part
        assert together == expected(shape, shard, 0, total)


def _local_shapes():
    """Return the shape of every local tensor: its shards' own shape, or one with as many elements as they have."""
    placement, shapes, counted = TrainPlacement(tp=2, pp=1, ep=2, dp=2, num_layer_list=(3,)), {}, {}
    for shard in TABLE.megatron(placement, 3):
        counted[shard.local] = counted.get(shard.local, 0) + torch.Size(shard.extents).numel()
        shapes[shard.local] = shard.view.shape or (counted[shard.local] // shard.extents[-1], shard.extents[-1])
        if len(shard.extents) == 1:
            shapes[shard.local] = shard.extents
    return shapes


SHAPES = _local_shapes()
