"""The advantages that docs/algorithms.md lists, as verl computes them at the pin, against their formulas in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.ray_trainer import AdvantageEstimator, compute_advantage

EPSILON = 1e-6


def whitened(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Normalize over all tokens of the batch to mean 0 and variance 1, with Bessel's correction."""
    flat = torch.cat(values)
    return [(value - flat.mean()) / (flat.var() + 1e-8).sqrt() for value in values]


def grpo(rewards: list[float], others: list[list[float]], lengths: list[int]) -> list[torch.Tensor]:
    scores = torch.tensor(rewards)
    stds = [torch.tensor(group).std() for group in others]
    means = [torch.tensor(group).mean() for group in others]
    return per_token([(r - m) / (s + EPSILON) for r, m, s in zip(scores, means, stds, strict=True)], lengths)


def without_deviation(rewards: list[float], others: list[list[float]], lengths: list[int]) -> list[torch.Tensor]:
    """Compute Dr. GRPO's advantages (arXiv:2503.20783)."""
    return per_token([r - torch.tensor(group).mean() for r, group in zip(rewards, others, strict=True)], lengths)


def leave_one_out(rewards: list[float], others: list[list[float]], lengths: list[int]) -> list[torch.Tensor]:
    """Compute RLOO's advantages (arXiv:2402.14740): the baseline is the mean of the group's other answers."""
    means = [(sum(group) - r) / (len(group) - 1) for r, group in zip(rewards, others, strict=True)]
    return per_token([torch.tensor(r - mean) for r, mean in zip(rewards, means, strict=True)], lengths)


def reinforce(rewards: list[float], others: list[list[float]], lengths: list[int]) -> list[torch.Tensor]:
    """Compute REINFORCE++ (arXiv:2501.03262), undiscounted: every token's return is the reward at the end."""
    return whitened(per_token([torch.tensor(r) for r in rewards], lengths))


def reinforce_with_baseline(rewards: list[float], others: list[list[float]], lengths: list[int]) -> list[torch.Tensor]:
    return whitened(without_deviation(rewards, others, lengths))


def per_token(scores: list[torch.Tensor], lengths: list[int]) -> list[torch.Tensor]:
    return [score.expand(length) for score, length in zip(scores, lengths, strict=True)]


REFERENCES = {
    ("grpo", True): grpo,
    ("grpo", False): without_deviation,
    ("rloo", True): leave_one_out,
    ("reinforce_plus_plus", True): reinforce,
    ("reinforce_plus_plus_baseline", True): reinforce_with_baseline,
}


def by_verl(rewards, groups, lengths, estimator, by_deviation):
    longest = max(lengths)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    scores = torch.zeros(len(lengths), longest)
    scores[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = torch.tensor(rewards)
    columns = TensorDict({"token_level_rewards": scores, "response_mask": mask}, [len(lengths)])
    data = DataProto(columns, {"uid": np.array(groups, dtype=object)})
    found = compute_advantage(data, AdvantageEstimator(estimator), norm_adv_by_std_in_grpo=by_deviation)
    advantages = found.batch["advantages"]
    assert torch.equal(advantages * (1 - mask), torch.zeros_like(advantages)), "padding has an advantage"
    return [row[:length] for row, length in zip(advantages, lengths, strict=True)]


@st.composite
def batches(draw):
    """Draw rewards, the group of each answer, and lengths; a prompt's answers may be anywhere in the batch."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=4))
    groups = draw(st.permutations([f"prompt {index}" for index, size in enumerate(sizes) for _ in range(size)]))
    amount = {"min_size": len(groups), "max_size": len(groups)}
    rewards = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0]), **amount))
    return rewards, groups, draw(st.lists(st.integers(1, 6), **amount))


@pytest.mark.parametrize(("estimator", "by_deviation"), REFERENCES)
@given(batches())
def test_advantages_are_those_of_the_formula(estimator, by_deviation, batch):
    rewards, groups, lengths = batch
    others = [[r for r, name in zip(rewards, groups, strict=True) if name == group] for group in groups]
    expected = REFERENCES[estimator, by_deviation](rewards, others, lengths)
    for found, wanted in zip(by_verl(*batch, estimator, by_deviation), expected, strict=True):
        torch.testing.assert_close(found, wanted.to(found.dtype), atol=2e-5, rtol=2e-5)


def test_each_formula_is_another():
    """The control: on this batch no two of the formulas agree."""
    batch = [1.0, 0.0, 0.25, 1.0, 0.0], ["a", "b", "a", "b", "a"], [1, 3, 2, 5, 4]
    found = [torch.cat(by_verl(*batch, *name)) for name in REFERENCES]
    for index, one in enumerate(found):
        assert not any(torch.allclose(one, other, atol=1e-3) for other in found[:index])


def generalized(rewards, values, gamma, lam):
    """Compute GAE (arXiv:1506.02438) by definition: sums of TD errors, none of which reaches beyond the last token."""
    ahead = [*values[1:], torch.tensor(0.0, dtype=torch.float64)]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards, ahead, values, strict=True)]
    return torch.stack(
        [
            torch.stack([(gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])]).sum()
            for t in range(len(deltas))
        ]
    )


def by_verl_with_a_critic(rewards, values, lengths, gamma, lam):
    """Compute verl's GAE advantages and returns; rewards and values are as long as each answer."""
    longest = max(lengths) + 1
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    padded = [torch.zeros(len(lengths), longest) for _ in range(2)]
    for row, length in enumerate(lengths):
        padded[0][row, :length], padded[1][row, :length] = rewards[row], values[row]
    columns = {"token_level_rewards": padded[0], "values": padded[1], "response_mask": mask}
    data = DataProto(TensorDict(columns, [len(lengths)]), {})
    found = compute_advantage(data, AdvantageEstimator.GAE, gamma=gamma, lam=lam).batch
    return [[found[name][row, :length] for row, length in enumerate(lengths)] for name in ("advantages", "returns")]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5)])
def test_a_critics_advantages_and_returns_are_those_of_the_definition(gamma, lam):
    generator, lengths = torch.Generator().manual_seed(4), [1, 7, 3, 12, 2]
    rewards, values = ([torch.randn(length, generator=generator) for length in lengths] for _ in range(2))
    plain = [generalized(r.double(), v.double(), gamma, lam) for r, v in zip(rewards, values, strict=True)]
    returns = [advantage + v for advantage, v in zip(plain, values, strict=True)]
    advantages, found_returns = by_verl_with_a_critic(rewards, values, lengths, gamma, lam)
    for found, wanted in zip([*advantages, *found_returns], [*whitened(plain), *returns], strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-6)
    # The control: another value of the last token gives other advantages.
    beyond = [torch.cat([v[:-1], v[-1:] + 1]) for v in values]
    assert not torch.allclose(by_verl_with_a_critic(rewards, beyond, lengths, gamma, lam)[0][1], advantages[1])
