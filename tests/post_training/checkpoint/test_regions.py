"""The memory area of a slice of a tensor matches torch's view of it."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from post_training.checkpoint.regions import Area, Region, StoredTensor
from post_training.layouts.layout import LocalView
from tests.post_training.checkpoint.test_fp8 import by_the_formula, random_weight, same_bits


@st.composite
def slices(draw):
    """Draw the shape of a matrix, whether it is stored transposed, and the bounds of a slice."""
    shape = draw(st.tuples(*[st.integers(1, 6)] * 2))
    transposed = draw(st.booleans())
    bounds = []
    for extent in reversed(shape) if transposed else shape:
        begin = draw(st.integers(0, extent - 1))
        bounds.append((begin, draw(st.integers(begin + 1, extent))))
    return shape, transposed, tuple(bounds)


@given(slices())
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
    """Rows in memory have 6 elements of 4 bytes, of which 4 elements belong to the slice."""
    area = Area.of((5, 6), LocalView()).part(((0, 5), (1, 5)))
    found = list(area.slabs(4, slab_bytes))
    assert [bottom - top for top, bottom in found] == heights
    assert [top for top, _ in found] == [sum(heights[:index]) for index in range(len(heights))]


@pytest.fixture(scope="module")
def fp8_weight(tmp_path_factory):
    """The region of a weight of 3 x 4 blocks in a file, and its values by the formula."""
    values, scales = random_weight(300, 500, seed=5)
    file: Path = tmp_path_factory.mktemp("fp8") / "weight"
    file.write_bytes(values.view(torch.uint8).numpy().tobytes() + scales.numpy().tobytes())
    stored = StoredTensor(file, 0, values.dtype, tuple(values.shape))
    stored_scales = StoredTensor(file, stored.nbytes, scales.dtype, tuple(scales.shape))
    return Region.of(stored, scales=stored_scales, name="weight"), by_the_formula(values, scales)


@given(st.data())
def test_a_part_of_a_part_of_an_fp8_weight_has_its_own_scales(fp8_weight, data):
    """Slice repeatedly, as a transfer does to fit a staging buffer; each slice is relative to the one before."""
    region, expected = fp8_weight
    for _ in range(3):
        bounds = []
        for extent in region.area.extents:
            begin = data.draw(st.integers(0, extent - 1))
            bounds.append((begin, data.draw(st.integers(begin + 1, extent))))
        (top, bottom), (left, right) = bounds
        region, expected = region.part(tuple(bounds)), expected[top:bottom, left:right]
        assert same_bits(region.read(), expected.contiguous())
