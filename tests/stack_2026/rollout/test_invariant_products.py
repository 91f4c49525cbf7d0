"""Products that upstream's mode leaves out: a row gives the same bits whatever other rows and experts there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import batch_invariant_ops  # noqa: F401
import pytest
import torch
import torch_npu
from torch import Tensor

from verl_plugin.rollout.invariant_products import products_of_experts, replace_grouped_matmul, replace_linear

EXPERTS, INNER, COLUMNS = 5, 64, 96
COUNTS = [3, 0, 7, 1, 9]
ROWS = sum(COUNTS)


def drawn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def replaced() -> Iterator[None]:
    libraries = [replace_linear(), replace_grouped_matmul()]
    yield
    for each in libraries:
        each._destroy()


def grouped(rows: Tensor, weights: Tensor, counts: list[int], **named: object) -> Tensor:
    """Call torch_npu's operator as vLLM-Ascend and verl do."""
    options = {"split_item": 2, "group_type": 0, "group_list_type": 1} | named
    given = torch.tensor(counts).npu()
    return torch_npu.npu_grouped_matmul([rows.npu()], [weights.npu()], group_list=given, **options)[0].cpu()


def expected(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    parts = zip(rows[: sum(counts)].double().split(counts), weights.double(), strict=True)
    return torch.cat([part @ weight for part, weight in parts])


def each_row_alone(call: Callable[..., Tensor], rows: Tensor, weights: Tensor) -> Tensor:
    """Call with one row at a time, and no rows of other experts."""
    owners = [expert for expert, count in enumerate(COUNTS) for _ in range(count)]
    alone = [[int(each == owner) for each in range(EXPERTS)] for owner in owners]
    return torch.cat([call(row[None], weights, counts) for row, counts in zip(rows, alone, strict=True)])


def test_row_of_an_expert_does_not_depend_on_other_rows(replaced):
    rows, weights = drawn(ROWS, INNER), drawn(EXPERTS, INNER, COLUMNS, seed=1)
    together = grouped(rows, weights, COUNTS)
    assert torch.equal(together, each_row_alone(grouped, rows, weights))
    torch.testing.assert_close(together.double(), expected(rows, weights, COUNTS), rtol=1e-5, atol=1e-4)


def test_operator_of_cann_depends_on_other_rows_on_this_host():
    rows, weights = drawn(ROWS, INNER), drawn(EXPERTS, INNER, COLUMNS, seed=1)
    assert not torch.equal(grouped(rows, weights, COUNTS), each_row_alone(grouped, rows, weights))


def test_ends_of_groups_and_a_weight_for_each_expert_give_the_same(replaced):
    rows, weights = drawn(ROWS, INNER), drawn(EXPERTS, INNER, COLUMNS, seed=1)
    ends = torch.tensor(COUNTS).cumsum(0).tolist()
    assert torch.equal(grouped(rows, weights, ends, group_list_type=0), grouped(rows, weights, COUNTS))
    listed = products_of_experts([rows.npu()], list(weights.npu()), group_list=torch.tensor(ends).npu())
    assert torch.equal(listed.cpu(), grouped(rows, weights, COUNTS))


def test_layout_and_number_of_columns_change_no_bit(replaced):
    """Training's weights are transposed views, of which it multiplies two halves one after the other."""
    rows, weights = drawn(ROWS, INNER), drawn(EXPERTS, INNER, COLUMNS, seed=1)
    whole, turned = grouped(rows, weights, COUNTS), weights.transpose(1, 2).contiguous().npu()
    halves = [grouped(rows, half.transpose(1, 2), COUNTS) for half in turned.chunk(2, dim=1)]
    assert torch.equal(torch.cat(halves, dim=1), whole)


def test_rows_of_no_expert_are_zero(replaced):
    """Experts of other ranks have rows behind those of this one."""
    rows, weights = drawn(ROWS + 4, INNER), drawn(EXPERTS, INNER, COLUMNS, seed=1)
    found = grouped(rows, weights, COUNTS)
    assert torch.equal(found[:ROWS], grouped(rows[:ROWS], weights, COUNTS)) and not found[ROWS:].any()


def test_bias_of_an_expert_is_added(replaced):
    rows, weights, bias = drawn(ROWS, INNER), drawn(EXPERTS, INNER, COLUMNS, seed=1), drawn(EXPERTS, COLUMNS, seed=2)
    added = bias.repeat_interleave(torch.tensor(COUNTS), 0)
    found = grouped(rows, weights, COUNTS, bias=[bias.npu()])
    assert torch.equal(found, grouped(rows, weights, COUNTS) + added)


@pytest.mark.parametrize("list_type", [0, 1])
def test_graph_gives_the_same_bits_with_other_numbers_of_rows(list_type):
    """A graph is captured with some rows of each expert, and replayed with others."""
    rows, weights = drawn(ROWS, INNER), drawn(EXPERTS, INNER, COLUMNS, seed=1).npu()
    lists = [[1, 8, 2, 4, 0], COUNTS]
    if list_type == 0:
        lists = [torch.tensor(each).cumsum(0).tolist() for each in lists]
    given, counts = rows.npu(), torch.tensor(lists[0]).npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        output = products_of_experts([given], [weights], group_list=counts, group_list_type=list_type)
    for each in lists:
        counts.copy_(torch.tensor(each))
        graph.replay()
        torch.npu.synchronize()
        eager = products_of_experts([given], [weights], group_list=counts, group_list_type=list_type)
        assert torch.equal(output.cpu(), eager.cpu()) and output.any()


def test_gradients_of_weights_are_those_of_cann(replaced):
    rows, gradient = drawn(ROWS, INNER), drawn(ROWS, COLUMNS, seed=1)
    found = torch_npu.npu_grouped_matmul(
        [rows.npu().t()], [gradient.npu()], group_list=torch.tensor(COUNTS).npu(), split_item=3, group_type=2,
        group_list_type=1,
    )[0].cpu()  # fmt: skip
    pairs = zip(rows.split(COUNTS), gradient.split(COUNTS), strict=True)
    torch.testing.assert_close(found, torch.stack([one.t() @ other for one, other in pairs]), rtol=1e-4, atol=1e-4)


def test_quantised_experts_rejected():
    rows, weights = drawn(ROWS, INNER).npu(), drawn(EXPERTS, INNER, COLUMNS).npu()
    with pytest.raises(NotImplementedError, match="npu_grouped_matmul with scale has no batch-invariant form"):
        products_of_experts([rows], [weights], group_list=torch.tensor(COUNTS).npu(), scale=[weights])


def linear_of(rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return torch's linear of all rows together, and of each row by itself."""
    call = torch.nn.functional.linear
    given = [None if each is None else each.npu() for each in (weight, bias)]
    with torch.inference_mode():
        return call(rows.npu(), *given).cpu(), torch.cat([call(row[None].npu(), *given).cpu() for row in rows])


@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_of_a_row_does_not_depend_on_the_others(replaced, has_bias):
    rows, weight = drawn(37, INNER), drawn(COLUMNS, INNER, seed=1)
    bias = drawn(COLUMNS, seed=2) if has_bias else None
    together, alone = linear_of(rows, weight, bias)
    assert torch.equal(together, alone)
    torch.testing.assert_close(together, torch.nn.functional.linear(rows, weight, bias), rtol=1e-5, atol=1e-4)


def test_linear_of_upstream_depends_on_the_others_on_this_host():
    together, alone = linear_of(drawn(37, INNER), drawn(COLUMNS, INNER, seed=1), drawn(COLUMNS, seed=2))
    assert not torch.equal(together, alone)
