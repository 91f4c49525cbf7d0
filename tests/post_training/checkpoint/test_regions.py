"""Where a part of a tensor lies in memory, against what torch says of the same view."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from post_training.checkpoint.regions import Area
from post_training.layouts.layout import LocalView


@st.composite
def boxes(draw):
    """A matrix, whether it is stored transposed, and a box of it."""
    shape = draw(st.tuples(*[st.integers(1, 6)] * 2))
    transposed = draw(st.booleans())
    box = []
    for extent in reversed(shape) if transposed else shape:
        begin = draw(st.integers(0, extent - 1))
        box.append((begin, draw(st.integers(begin + 1, extent))))
    return shape, transposed, tuple(box)


@given(boxes())
def test_a_part_lies_where_torchs_view_does(drawn):
    shape, transposed, ((top, bottom), (left, right)) = drawn
    stored = torch.arange(shape[0] * shape[1]).view(shape)
    spoken_of = stored.t() if transposed else stored
    view = spoken_of[top:bottom, left:right]
    area = Area.of(shape, LocalView(transposed=transposed)).part(((top, bottom), (left, right)))
    assert area.extents == tuple(view.shape)
    assert (area.start, area.stop) == (int(view.min()), int(view.max()) + 1)
    memory = view.t() if transposed else view
    assert (area.rows, area.columns) == tuple(memory.shape)
    assert area.contiguous is (memory.numel() == area.stop - area.start)


@pytest.mark.parametrize(("slab_bytes", "heights"), [(1, [1] * 5), (48, [2, 2, 1]), (72, [3, 2]), (1000, [5])])
def test_slabs_are_whole_rows_and_no_larger_than_asked(slab_bytes, heights):
    """Rows of 6 elements of 4 bytes in memory, of which 4 belong to the part."""
    area = Area.of((5, 6), LocalView()).part(((0, 5), (1, 5)))
    found = list(area.slabs(4, slab_bytes))
    assert [bottom - top for top, bottom in found] == heights
    assert [top for top, _ in found] == [sum(heights[:index]) for index in range(len(heights))]
