"""Rows of an embedding that are longer than a largest norm are scaled down to it in the table before they are read."""

import pytest
import torch
from torch.nn import functional


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_rows_that_are_read_get_the_largest_norm_in_the_table(dtype, norm):
    drawn = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    table, indices = (drawn * torch.tensor([[0.1], [9]] * 3)).to(dtype), torch.tensor([[1, 4], [1, 0]])
    expected_table = table.float().clone()
    expected = functional.embedding(indices, expected_table, max_norm=2, norm_type=norm)
    on_npu = table.to("npu")
    given = functional.embedding(indices.to("npu"), on_npu, max_norm=2, norm_type=norm)
    assert torch.equal(given.cpu(), expected.to(dtype))
    assert torch.equal(on_npu.cpu(), expected_table.to(dtype))
    changed = (on_npu.cpu() != table).any(1).tolist()
    assert changed == [False, True, False, False, False, False], "row 1 alone was read and too long"
