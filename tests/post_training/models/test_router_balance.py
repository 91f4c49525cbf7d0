"""Round-robin experts have even loads, and vLLM-Ascend's own routers choose them."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import verl_patches.prelude_patch  # noqa: F401  (the NPU, emulated where there is none)
from post_training.models.router_balance import balanced, dealt_experts, logits_for_dealt_experts

CPU = torch.device("cpu")
# DeepSeek-V3's sizes: a token uses 8 of 256 experts, from the best 4 of 8 groups.
PER_TOKEN, EXPERTS, GROUPS, GROUPS_PER_TOKEN = 8, 256, 8, 4


def test_a_worked_example():
    assert dealt_experts(3, 2, 4, CPU).tolist() == [[0, 1], [2, 3], [0, 1]]


@given(st.integers(0, 70), st.integers(1, 8), st.integers(0, 40))
def test_shares_differ_by_one_at_most_and_no_token_goes_twice_to_one_expert(tokens, per_token, others):
    experts = per_token + others
    dealt = dealt_experts(tokens, per_token, experts, CPU)
    counts = Counter(dealt.flatten().tolist())
    shares = [counts[expert] for expert in range(experts)]
    assert max(shares) - min(shares) <= 1 and sum(shares) == tokens * per_token
    assert all(len(set(row)) == per_token for row in dealt.tolist())


@pytest.mark.parametrize("tokens", [32, 64, 1024])
def test_the_cluster_jobs_batches_are_dealt_out_evenly(tokens):
    assert set(Counter(dealt_experts(tokens, PER_TOKEN, EXPERTS, CPU).flatten().tolist()).values()) == {
        tokens * PER_TOKEN // EXPERTS
    }


def chosen_by_the_fused_operator(logits: torch.Tensor, bias: torch.Tensor | None) -> list[set[int]]:
    """Call the fused operator as vLLM-Ascend does for 256 experts, and return each token's experts."""
    _, experts, _ = torch.ops.npu.npu_moe_gating_top_k(
        logits.npu(),
        k=PER_TOKEN,
        bias=None if bias is None else bias.npu(),
        k_group=GROUPS_PER_TOKEN,
        group_count=GROUPS,
        group_select_mode=1,
        renorm=0,
        norm_type=1,
        routed_scaling_factor=1,
        eps=1e-20,
    )
    return [set(row) for row in experts.cpu().tolist()]


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 70),
    scale=st.sampled_from([0.0, 0.1, 10.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_the_fused_router_chooses_the_dealt_experts_whatever_the_scores(tokens, scale, dtype, seed):
    logits = (torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
    wanted = [set(row) for row in dealt_experts(tokens, PER_TOKEN, EXPERTS, CPU).tolist()]
    made = logits_for_dealt_experts(logits, PER_TOKEN)
    assert made.dtype is dtype and chosen_by_the_fused_operator(made, torch.zeros(EXPERTS, dtype=dtype)) == wanted
    if scale and tokens > 2:
        assert chosen_by_the_fused_operator(logits, None) != wanted


@pytest.mark.parametrize("score", [torch.sigmoid, lambda logits: logits.softmax(-1)])
def test_other_routers_choose_them_too(score):
    """Routers without groups choose them, also if the number of experts is no multiple of the number chosen."""
    made = logits_for_dealt_experts(torch.randn(9, 10), 3)
    best = score(made).topk(3).indices.sort().values
    assert best.tolist() == dealt_experts(9, 3, 10, CPU).sort().values.tolist()


def test_the_scores_still_matter_to_who_reads_them():
    """Logits stay inputs, so that a graph cannot drop the router, and NaN passes through."""
    logits = torch.zeros(2, EXPERTS)
    logits[1, 5] = float("nan")
    made = logits_for_dealt_experts(logits, PER_TOKEN)
    assert made[1, 5].isnan() and made.isnan().sum() == 1
    assert not torch.equal(logits_for_dealt_experts(torch.ones(2, EXPERTS), PER_TOKEN), made)


def test_a_learned_balance_has_no_say():
    """A bias as large as in published checkpoints would otherwise outweigh the scores, which are below 1."""
    given = {}
    bias = torch.linspace(-9, 9, EXPERTS)
    balanced(lambda **options: given.update(options))(
        layer="layer", router_logits=torch.randn(4, EXPERTS), top_k=PER_TOKEN, e_score_correction_bias=bias
    )
    assert given["layer"] == "layer" and given["top_k"] == PER_TOKEN
    wanted = [set(row) for row in dealt_experts(4, PER_TOKEN, EXPERTS, CPU).tolist()]
    assert chosen_by_the_fused_operator(given["router_logits"], given["e_score_correction_bias"]) == wanted
    assert chosen_by_the_fused_operator(given["router_logits"], bias) != wanted


def test_no_bias_stays_none():
    given = {}
    balanced(lambda **options: given.update(options))(router_logits=torch.zeros(1, 4), top_k=2)
    assert given["e_score_correction_bias"] is None
