"""Expert choices that are decided by rounding: margins for this project's router and Megatron's own."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import verl_patches.prelude_patch  # noqa: F401  (before Megatron)
from post_training.mismatch.router_ties import TIED_STEPS, choice_margins, tied_choices


def moved(scores: torch.Tensor, by: torch.Tensor, seed: int) -> torch.Tensor:
    """Move each of the scores [tokens, experts] up or down by `by` [tokens], at random."""
    signs = torch.randint(2, scores.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return scores + signs * by.unsqueeze(1)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), groups=st.sampled_from([(1, 1), (4, 1), (4, 2), (8, 4), (8, 8)]))
def test_scores_within_a_margin_choose_the_same_experts(seed, groups):
    from post_training.models.megatron.group_limited_router import choose_experts

    scores = torch.rand(40, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    margins = choice_margins(scores, 4, *groups)
    chosen = choose_experts(scores, *groups, 4).sort().values
    for way in range(8):
        within = choose_experts(moved(scores, 0.99 * margins, way), *groups, 4).sort().values
        assert torch.equal(within, chosen)
    swapped = torch.zeros(40, dtype=torch.bool)
    for way in range(40):
        beyond = choose_experts(moved(scores, 4 * margins, way), *groups, 4).sort().values
        swapped |= (beyond != chosen).any(1)
    assert swapped.float().mean() > 0.8, "a margin that is too small would excuse nothing, and one of 0 everything"


def test_megatron_router_is_tied_where_its_logits_are():
    config = SimpleNamespace(moe_router_topk=2)
    router = SimpleNamespace(weight=torch.eye(4), config=config)
    tokens = torch.tensor([[3.0, 2.0, 2.0 + 2**-21, 1.0], [3.0, 2.5, 2.0, 1.0], [3.0, 3.0 + 2**-21, 2.0, 1.0]])
    assert tied_choices(router, tokens).tolist() == [True, False, False]


def test_scores_one_step_beyond_a_tie_are_not_tied():
    router = SimpleNamespace(weight=torch.eye(4), config=SimpleNamespace(moe_router_topk=2))
    # The largest score, 2, determines the step: 2**-22.
    tokens = [[2.0, 1.0, 1.0 - steps * 2**-22, 0.0] for steps in (TIED_STEPS, TIED_STEPS + 1)]
    assert tied_choices(router, torch.tensor(tokens)).tolist() == [True, False]


def test_small_logits_are_tied_where_softmax_rounds_their_scores_alike():
    """Logits near 2**-7 that differ by 2**-25 are several of their own steps apart, but their scores less than one."""
    router = SimpleNamespace(weight=torch.eye(4), config=SimpleNamespace(moe_router_topk=2))
    logits = torch.tensor([[2**-6, 2**-7, 2**-7 - 2**-25, 0.0], [2**-6, 2**-7, 2**-7 - 2**-19, 0.0]])
    assert (logits[0].softmax(-1)[1] - logits[0].softmax(-1)[2]).item() < 2**-25
    assert tied_choices(router, logits).tolist() == [True, False]
