"""Operators that take indices of 32 bits, as CANN's documents say, against torch on the host with those of 64.

torch itself rejects them for `scatter`, but not for `scatter_`.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

BY_INDEX: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "gather": lambda x, index, source: x.gather(1, index),
    "scatter in place": lambda x, index, source: x.clone().scatter_(1, index, source),
    "scatter a value in place": lambda x, index, source: x.clone().scatter_(1, index, 2.5),
    "add where scattered": lambda x, index, source: x.scatter_add(1, index, source),
    "take": lambda x, index, source: x.take(index),
    "put": lambda x, index, source: x.clone().put_(index[0], source[0, :3]),
    "rows": lambda x, index, source: x[index[0]],
    "rows in place": lambda x, index, source: x.clone().index_put_((index[0, :2],), source[:2]),
    "select": lambda x, index, source: x.index_select(0, index[0]),
    "add rows": lambda x, index, source: x.index_add(0, index[0], source[:3]),
    "copy rows": lambda x, index, source: x.index_copy(0, index[0, :2], source[:2]),
    "copy rows in place": lambda x, index, source: x.clone().index_copy_(0, index[0, :2], source[:2]),
    "fill rows": lambda x, index, source: x.index_fill(0, index[0, :2], -torch.inf),
    "fill rows in place": lambda x, index, source: x.clone().index_fill_(0, index[0, :2], -torch.inf),
    "embedding": lambda x, index, source: torch.nn.functional.embedding(index, x),
}


@pytest.mark.parametrize("name", BY_INDEX)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_are_taken_in_both_widths(name, dtype):
    torch.manual_seed(0)
    x, source, index = torch.randn(4, 4), torch.randn(4, 4), torch.tensor([[2, 0, 1], [1, 3, 0], [0, 2, 3], [3, 1, 2]])
    function = BY_INDEX[name]
    found = function(x.to("npu"), index.to("npu", dtype), source.to("npu")).cpu()
    torch.testing.assert_close(found, function(x, index, source))
