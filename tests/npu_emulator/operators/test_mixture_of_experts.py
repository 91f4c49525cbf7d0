"""Routing operators against loops over tokens, and together against a mixture computed expert by expert."""

from importlib.metadata import version

import pytest
import torch
import torch_npu
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.npu_emulator.operators.compare import refused


def chosen_by_loop(row, bias, k, groups, kept_groups, by_sum, sigmoid):
    """Experts and weights of one token, group by group."""
    scores = row.double().sigmoid() if sigmoid else row.double().softmax(0)
    choice = scores + bias.double()
    size = row.numel() // groups
    standing = []
    for group in range(groups):
        members = sorted(choice[group * size : (group + 1) * size].tolist(), reverse=True)
        standing.append(sum(members[:2]) if by_sum else members[0])
    best = sorted(range(groups), key=lambda group: -standing[group])[:kept_groups]
    allowed = [expert for group in best for expert in range(group * size, (group + 1) * size)]
    experts = sorted(allowed, key=lambda expert: -float(choice[expert]))[:k]
    weights = scores[experts]
    return experts, weights / (weights.sum() + 1e-20) if sigmoid else weights


@pytest.mark.parametrize(("experts", "groups", "kept"), [(256, 8, 4), (16, 4, 2), (8, 1, 1)])
@pytest.mark.parametrize("by_sum", [True, False])
@pytest.mark.parametrize("sigmoid", [True, False])
def test_gating_chooses_groups_then_experts(experts, groups, kept, by_sum, sigmoid):
    torch.manual_seed(experts + groups)
    logits, bias, k = torch.randn(7, experts), torch.randn(experts) * 0.1, 4
    weights, chosen, scores = torch_npu.npu_moe_gating_top_k(
        logits.to("npu"), k=k, bias=bias.to("npu"), k_group=kept, group_count=groups, group_select_mode=int(by_sum),
        renorm=0, norm_type=int(sigmoid), routed_scaling_factor=2.5, eps=1e-20,
    )  # fmt: skip
    assert chosen.dtype == torch.int32 and scores.shape == logits.shape
    for token in range(7):
        expected, expected_weights = chosen_by_loop(logits[token], bias, k, groups, kept, by_sum, sigmoid)
        assert chosen[token].tolist() == expected
        torch.testing.assert_close(weights[token].cpu().double(), 2.5 * expected_weights, rtol=1e-5, atol=1e-6)


def test_gating_by_roots_of_softplus():
    torch.manual_seed(0)
    logits = torch.randn(7, 16)
    weights, chosen, _ = torch_npu.npu_moe_gating_top_k(logits.to("npu"), 4, norm_type=2, eps=1e-20)
    best = torch.nn.functional.softplus(logits.double()).sqrt().topk(4)
    assert chosen.tolist() == best.indices.tolist()
    torch.testing.assert_close(weights.cpu().double(), best.values / best.values.sum(-1, True), rtol=1e-5, atol=1e-6)


def test_group_modes_differ():
    """The best expert may be in a group whose best two are worse: the two modes must not agree by chance."""
    logits = torch.tensor([[5.0, -5.0, 4.0, 4.0]]).to("npu")
    chosen = [
        torch_npu.npu_moe_gating_top_k(logits, 1, k_group=1, group_count=2, group_select_mode=mode, norm_type=1)[
            1
        ].item()
        for mode in (0, 1)
    ]
    assert chosen == [0, 2]


def test_a_group_that_is_left_out_has_no_expert_even_if_all_others_are_below_zero():
    logits, bias = torch.zeros(1, 4).to("npu"), torch.tensor([-2.0, -2.0, -3.0, -3.0]).to("npu")
    chosen = torch_npu.npu_moe_gating_top_k(logits, 2, bias=bias, k_group=1, group_count=2, norm_type=1)[1]
    assert sorted(chosen[0].tolist()) == [0, 1]


def test_softmax_gating_marks_finished_tokens():
    logits = torch.randn(4, 6)
    finished = torch.tensor([False, True, False, False])
    weights, experts, rows = torch_npu.npu_moe_gating_top_k_softmax(logits.to("npu"), finished.to("npu"), k=2)
    expected = logits.softmax(-1).topk(2)
    torch.testing.assert_close(weights.cpu(), expected.values)
    assert experts[[0, 2, 3]].tolist() == expected.indices[[0, 2, 3]].tolist() and experts[1].tolist() == [6, 6]
    assert rows.tolist() == [[token, 4 + token] for token in range(4)]


@settings(max_examples=30)
@given(some.integers(1, 9), some.integers(1, 4), some.integers(4, 40), some.integers(0, 99))
def test_routing_there_and_back_equals_a_loop_over_experts(tokens, k, experts, seed):
    torch.manual_seed(seed)
    x, weight = torch.randn(tokens, 6), torch.randn(experts, 6, 5)
    chosen = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]).to(torch.int32)
    scales, skip = torch.rand(tokens, k), torch.randn(tokens, 5)
    numbers = torch.arange(tokens * k, dtype=torch.int32).view(k, tokens).t().contiguous()
    rows, position, sorted_experts = torch_npu.npu_moe_init_routing(
        x.to("npu"), row_idx=numbers.to("npu"), expert_idx=chosen.to("npu"), active_num=tokens
    )
    totals = torch_npu.npu_moe_compute_expert_tokens(sorted_experts, experts)
    assert totals.tolist() == torch.bincount(chosen.flatten().long(), minlength=experts).cumsum(0).tolist()
    product = torch_npu.npu_grouped_matmul(
        x=[rows], weight=[weight.to("npu")], split_item=2, group_list_type=0, group_type=0, group_list=totals.long()
    )[0]
    counts = torch.diff(totals.cpu(), prepend=torch.zeros(1, dtype=torch.int32))
    again = torch_npu.npu_grouped_matmul(
        [rows], [weight.to("npu")], split_item=3, group_list_type=1, group_type=0, group_list=counts.long().to("npu")
    )[0]
    assert torch.equal(product, again)
    out = torch_npu.npu_moe_finalize_routing(
        product, skip1=skip.to("npu"), skip2=None, bias=None, scales=scales.to("npu"),
        expanded_src_to_dst_row=position, export_for_source_row=chosen.to("npu"),
    )  # fmt: skip
    expected = skip.double().clone()
    for token in range(tokens):
        for choice in range(k):
            expected[token] += scales[token, choice] * (x[token].double() @ weight[chosen[token, choice]].double())
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=20)
@given(some.integers(1, 9), some.integers(1, 4), some.integers(0, 99))
def test_permutation_and_its_inverse(tokens, k, seed):
    torch.manual_seed(seed)
    chosen = torch.stack([torch.randperm(12)[:k] for _ in range(tokens)])
    x, probs = torch.randn(tokens, 5), torch.rand(tokens, k)
    permuted, position = torch_npu.npu_moe_token_permute(x.to("npu"), chosen.to("npu"))
    order = sorted(range(tokens * k), key=lambda entry: (int(chosen.flatten()[entry]), entry))
    assert torch.equal(permuted.cpu(), x[[entry // k for entry in order]])
    assert [order[row] for row in position.tolist()] == list(range(tokens * k))
    weighed = torch_npu.npu_moe_token_unpermute(permuted, position, probs.to("npu"))
    torch.testing.assert_close(weighed.cpu(), x * probs.sum(-1, keepdim=True))


def test_dropped_tokens_give_nothing():
    x, chosen = torch.ones(3, 2, device="npu"), torch.tensor([0, 1, 2], device="npu")
    rows, position = torch_npu.npu_moe_token_permute(x, chosen, num_out_tokens=2)
    assert rows.shape == (2, 2)
    assert torch_npu.npu_moe_token_unpermute(rows, position).tolist() == [[1, 1], [1, 1], [0, 0]]


@settings(max_examples=20)
@given(some.lists(some.integers(0, 5), min_size=1, max_size=12), some.integers(0, 99))
def test_grouped_products_of_rows_and_of_inner_dimensions(sizes, seed):
    torch.manual_seed(seed)
    rows, weight = torch.randn(sum(sizes), 4).bfloat16(), torch.randn(len(sizes), 4, 3).bfloat16()
    gradient = torch.randn(sum(sizes), 3).bfloat16()
    counts = torch.tensor(sizes, device="npu")
    forward = torch_npu.npu_grouped_matmul(
        [rows.to("npu")], [weight.to("npu")], split_item=3, group_type=0, group_list_type=1, group_list=counts
    )[0]
    before = torch.randn(len(sizes) * 4, 3)
    inner = before.to("npu")
    returned = torch_npu.npu_grouped_matmul_add_(
        inner, rows.to("npu"), gradient.to("npu"), counts.cumsum(0), transpose_x=True, group_type=2
    )
    assert returned.data_ptr() == inner.data_ptr()
    inner = (inner.cpu() - before).view(len(sizes), 4, 3)
    for number, (row, grad) in enumerate(zip(rows.split(sizes), gradient.split(sizes), strict=True)):
        start = sum(sizes[:number])
        torch.testing.assert_close(forward[start : start + sizes[number]].cpu(), row @ weight[number])
        torch.testing.assert_close(inner[number], row.float().t() @ grad.float(), rtol=1e-5, atol=1e-5)


def test_grouped_matmul_without_groups_pairs_its_lists():
    x, weight = [torch.randn(2, 3), torch.randn(4, 3)], [torch.randn(3, 2), torch.randn(3, 2)]
    on_npu = [[tensor.to("npu") for tensor in tensors] for tensors in (x, weight)]
    for got, one, other in zip(torch_npu.npu_grouped_matmul(*on_npu, group_type=-1), *(x, weight), strict=True):
        torch.testing.assert_close(got.cpu(), one @ other)


def test_groups_of_what_is_summed_over():
    """Gradients of weights need them. torch_npu 2.5.1 leaves them to npu_grouped_matmul_add_."""
    x, groups = torch.randn(4, 3), torch.tensor([1, 4])
    given = dict(group_list=groups.to("npu"), group_type=2, split_item=3)
    if version("torch_npu").startswith("2.5"):
        with pytest.raises(RuntimeError, match="group_type currently only support -1 and 0, current value is 2"):
            torch_npu.npu_grouped_matmul([x.to("npu").t()], [x.to("npu")], **given)
        return
    (found,) = torch_npu.npu_grouped_matmul([x.to("npu").t()], [x.to("npu")], **given)
    torch.testing.assert_close(found.cpu(), torch.stack([x[:1].t() @ x[:1], x[1:].t() @ x[1:]]))


def test_grouped_matmul_names_unsupported_arguments():
    x, weight, groups = torch.randn(4, 3).to("npu"), torch.randn(2, 3, 3).to("npu"), torch.tensor([2, 2]).to("npu")
    with refused("act_type 1 is not emulated"):
        torch_npu.npu_grouped_matmul([x], [weight], act_type=1, group_list=groups, group_type=0, split_item=2)
    with refused("transpose_x must be true, transpose_weight false and group_type 2, not 0"):
        torch_npu.npu_grouped_matmul_add_(weight, x, x, groups, transpose_x=False)
    with refused("group_list has 3 entries for 2 groups"):
        torch_npu.npu_grouped_matmul(
            [x], [weight], group_list=torch.tensor([1, 1, 2]).to("npu"), group_type=0, split_item=2
        )
