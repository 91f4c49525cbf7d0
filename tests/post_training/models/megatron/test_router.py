"""The choice of experts matches a literal implementation of the paper, one token and one group at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import verl_patches.prelude_patch  # noqa: F401


def naive_choice(scores: list[float], num_groups: int, groups_per_token: int, experts_per_token: int) -> set[int]:
    size = len(scores) // num_groups
    groups = [scores[group * size : (group + 1) * size] for group in range(num_groups)]
    strength = [sum(sorted(group, reverse=True)[:2]) for group in groups]
    best = sorted(range(num_groups), key=lambda group: -strength[group])[:groups_per_token]
    allowed = [group * size + member for group in best for member in range(size)]
    return set(sorted(allowed, key=lambda expert: -scores[expert])[:experts_per_token])


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    groups=st.sampled_from([(1, 1), (4, 1), (4, 2), (8, 4), (8, 8)]),
    size=st.sampled_from([2, 4, 32]),
    top=st.integers(1, 2),
)
def test_choice_equals_the_definition(seed, groups, size, top):
    from post_training.models.megatron.group_limited_router import choose_experts

    num_groups, groups_per_token = groups
    scores = torch.rand(5, num_groups * size, generator=torch.Generator().manual_seed(seed)) - 0.3
    chosen = choose_experts(scores, num_groups, groups_per_token, top)
    for row, experts in zip(scores.tolist(), chosen.tolist(), strict=True):
        assert set(experts) == naive_choice(row, num_groups, groups_per_token, top)


def test_negative_scores_never_open_a_closed_group():
    """All scores of the open group are negative, so filling closed groups with 0 would choose from those."""
    from post_training.models.megatron.group_limited_router import choose_experts

    scores = torch.tensor([[-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]])
    assert choose_experts(scores, 3, 1, 2).tolist() == [[0, 1]]


def router_of(**options):
    from post_training.models.megatron.deepseek_v3_config import DeepseekV3TransformerConfig
    from post_training.models.megatron.group_limited_router import GroupLimitedRouter

    sizes = {"num_moe_experts": 16, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
    return GroupLimitedRouter(
        DeepseekV3TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=4, add_bias_linear=False, **sizes, **options
        )
    )


def test_the_expert_bias_is_not_cast_with_the_model():
    router = router_of()
    router.expert_bias.fill_(1 / 3)
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16 and router.expert_bias.dtype == torch.float32
    assert router.expert_bias.eq(torch.tensor(1 / 3)).all()


def test_router_of_a_bfloat16_model_multiplies_in_float32():
    """Compare logits with transformers' DeepSeek-V3 router, which does so; rounded logits are up to 0.4 % off."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    torch.manual_seed(0)
    router = router_of().bfloat16()
    sizes = {"hidden_size": 8, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    theirs = DeepseekV3TopkRouter(DeepseekV3Config(**sizes, norm_topk_prob=True, routed_scaling_factor=1.0))
    theirs.weight.data = router.weight.detach().cpu()
    theirs.e_score_correction_bias.zero_()
    tokens = 4 * torch.randn(64, 8, dtype=torch.bfloat16)
    weights, experts = router(tokens.npu())
    numbers, expected = theirs(tokens[None])
    found = torch.zeros(64, 16).scatter_(1, experts.cpu(), weights.detach().cpu())
    torch.testing.assert_close(found, torch.zeros(64, 16).scatter_(1, numbers, expected.detach().float()))


@pytest.mark.parametrize("forced", [True, False])
def test_a_balanced_router_deals_experts_out_and_weighs_them_by_their_own_scores(forced):
    torch.manual_seed(0)
    router = router_of(moe_router_force_load_balancing=forced)
    tokens = torch.randn(8, 8).npu()
    weights, experts = router(tokens)
    shares = experts.flatten().bincount(minlength=16).tolist()
    assert (shares == [2] * 16) is forced
    scores = (tokens @ router.weight.t()).sigmoid().gather(1, experts)
    torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True))
    weights.sum().backward()
    assert router.weight.grad is not None


def test_router_names_the_tokens_that_rounding_decides():
    """Published biases are near 5, where float32 values are 4.8e-7 apart; the last two of four experts are tied."""
    from post_training.mismatch.router_ties import tied_choices

    router = router_of()
    with torch.no_grad():
        router.weight.zero_()
    bias = torch.linspace(4.9, 5.1, 16)
    router.expert_bias.copy_(bias)
    tokens = torch.randn(3, 1, 8).npu()
    assert not tied_choices(router, tokens).any()
    best = bias.reshape(4, 4)[2:].flatten().argsort(descending=True) + 8
    for steps, tied in ((2, True), (7, True), (30, False)):
        router.expert_bias.copy_(bias)
        router.expert_bias[best[4]] = router.expert_bias[best[3]] - steps * 2**-21
        assert tied_choices(router, tokens).tolist() == [tied] * 3


def test_router_of_qwen3_names_the_tokens_that_rounding_decides():
    """Call it as `recorded_training_choices` does in a float32 run."""
    from post_training.mismatch.router_ties import tied_choices
    from post_training.models.megatron.moe_config import MoETransformerConfig
    from post_training.models.megatron.softmax_router import SoftmaxRouter

    sizes = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 4, "num_moe_experts": 4, "moe_router_topk": 2}
    router = SoftmaxRouter(MoETransformerConfig(**sizes, add_bias_linear=False))
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    tokens = torch.tensor([[[3.0, 2.0, 2.0 - 2**-21, 1.0]], [[3.0, 2.0, 2.0 - 2**-18, 1.0]]]).npu()
    assert tied_choices(router, tokens).tolist() == [True, False]
