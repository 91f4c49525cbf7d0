"""Products of matrices of 16-bit numbers are added up in float32 and rounded once, as by the cube units of a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_npu
from torch import Tensor

LONG = 4096
"""Products of a sum: so many that a sum which is rounded on its way comes out otherwise."""

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
PRODUCTS: dict[str, Product] = {
    "mm": lambda a, b, c: torch.mm(a, b),
    "mm.out": lambda a, b, c: torch.mm(a, b, out=c.new_empty(0)),
    "mm into what is there": lambda a, b, c: torch.mm(a, b, out=torch.empty_like(c)),
    "addmm": lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2),
    "addmm_": lambda a, b, c: c.clone().addmm_(a, b),
    "addmm.out": lambda a, b, c: torch.addmm(c, a, b, out=torch.empty_like(c)),
    "bmm": lambda a, b, c: torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1)),
    "baddbmm": lambda a, b, c: torch.baddbmm(c, a.expand(2, -1, -1), b.expand(2, -1, -1), beta=2),
    "addbmm": lambda a, b, c: torch.addbmm(c, a.expand(2, -1, -1), b.expand(2, -1, -1)),
    "addmv": lambda a, b, c: torch.addmv(c[:, 0], a, b[:, 0]),
    "mv": lambda a, b, c: torch.mv(a, b[:, 0]),
    "dot": lambda a, b, c: torch.dot(a[0], b[:, 0]),
    "linear": lambda a, b, c: torch.nn.functional.linear(a, b.t(), c[0]),
    "matmul of many": lambda a, b, c: torch.matmul(a.unflatten(0, (2, -1)), b),
}


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    sizes = ((6, LONG), (LONG, 5), (6, 5))
    return tuple(torch.rand(size, generator=draw).to(dtype) for size in sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_that_of_float32_rounded_once(name, dtype):
    product, given = PRODUCTS[name], factors(dtype)
    expected = product(*(tensor.float() for tensor in given)).to(dtype)
    found = product(*(tensor.to("npu") for tensor in given))
    assert found.dtype == dtype and found.device.type == "npu"
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


def test_a_sum_that_is_rounded_on_its_way_would_be_found():
    left, right, _ = factors(torch.bfloat16)
    rounded = torch.zeros(6, 5, dtype=torch.bfloat16)
    for part in range(0, LONG, 64):
        rounded = rounded + left[:, part : part + 64] @ right[part : part + 64]
    assert not torch.equal(rounded, torch.mm(left.to("npu"), right.to("npu")).cpu())


def test_a_product_in_a_graph_is_the_same_when_it_is_replayed():
    left, right, total = (tensor.to("npu") for tensor in factors(torch.bfloat16))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        made = torch.mm(left, right)
        total.addmm_(left, right)
    left.neg_()
    before = total.clone()
    graph.replay()
    assert torch.equal(made, torch.mm(left, right)) and torch.equal(total, torch.addmm(before, left, right))


@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 0, 0], [8, 0, 0]])
def test_groups_are_products_of_their_own(sizes):
    draw = torch.Generator().manual_seed(2)
    rows, weights = (torch.rand(size, generator=draw).bfloat16() for size in ((sum(sizes), LONG), (3, LONG, 4)))
    ends = torch.tensor(sizes, device="npu").cumsum(0)
    (of_rows,) = torch_npu.npu_grouped_matmul(
        [rows.to("npu")], [weights.to("npu")], group_list=ends, split_item=3, group_type=0
    )
    of_columns = torch.zeros(3 * LONG, 7, device="npu")
    torch_npu.npu_grouped_matmul_add_(of_columns, rows.to("npu"), rows[:, :7].to("npu"), ends)
    parts = zip(of_rows.cpu().split(sizes), of_columns.cpu().split(LONG), rows.split(sizes), weights, strict=True)
    for of_row, of_column, part, weight in parts:
        assert torch.equal(of_row, (part.float() @ weight.float()).bfloat16())
        assert torch.equal(of_column, torch.zeros(LONG, 7).addmm_(part.float().t(), part[:, :7].float()))
