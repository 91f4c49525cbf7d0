"""Importance weights of the rollout's tokens: verl's own loss with them equals the corrected loss written out."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_policy_loss

from verl_patches.features.rollout_correction.weights import corrected, correcting, truncated_ratios
from verl_patches.trainer.configuration_checks import ConfigurationError, check_configuration
from verl_patches.trainer.main_ppo import compose

SWITCH = "actor_rollout_ref.overlay.rollout_correction.enabled=true"
RECOMPUTED = "actor_rollout_ref.actor.recompute_old_log_prob=true"
LOW, HIGH, DUAL, CAP = 0.1, 0.2, 3.0, 2.0


def drawn(lengths: list[int], seed: int, apart: float) -> DataProto:
    """Draw a batch as verl's loop passes it to the update: prompts of one token, and noise behind each answer's end."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    noise = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    mask = torch.arange(1 + max(lengths)) <= torch.tensor(lengths)[:, None]
    columns = {
        "old_log_probs": noise[0] - 3,
        "rollout_log_probs": noise[0] - 3 + apart * noise[1],
        "advantages": noise[2],
        "attention_mask": mask.long(),
    }
    return DataProto.from_dict(columns)


def written_out(batch: DataProto, log_probs: torch.Tensor) -> torch.Tensor:
    """Return the mean over tokens of min(p_old / p_rollout, cap) times PPO's token loss with the dual clip."""
    columns, terms = batch.batch, []
    for row, length in enumerate(columns["attention_mask"].sum(-1) - 1):
        for token in range(length):
            old, rollout, advantage = (
                columns[name][row, token] for name in ("old_log_probs", "rollout_log_probs", "advantages")
            )
            ratio = (log_probs[row, token] - old).exp()
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - LOW, 1 + HIGH))
            if advantage < 0:
                loss = torch.minimum(loss, -advantage * DUAL)
            terms.append(min((old - rollout).exp().item(), CAP) * loss)
    return torch.stack(terms).mean()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 1000), st.sampled_from([0.0, 0.1, 2.0]))
def test_verls_loss_has_the_weight_on_every_token(lengths, seed, apart):
    batch = drawn(lengths, seed, apart)
    generator = torch.Generator().manual_seed(seed + 1)
    old = batch.batch["old_log_probs"]
    log_probs = (old + torch.randn(old.shape, generator=generator, dtype=torch.float64)).requires_grad_()
    changed, _ = corrected(batch, CAP)
    found, *_ = compute_policy_loss(
        old, log_probs, changed.batch["advantages"], changed.batch["attention_mask"][:, 1:], cliprange=LOW,
        cliprange_low=LOW, cliprange_high=HIGH, clip_ratio_c=DUAL,
    )  # fmt: skip
    expected = written_out(batch, log_probs)
    assert found.item() == pytest.approx(expected.item(), abs=1e-7)
    gradients = (torch.autograd.grad(loss, log_probs)[0] for loss in (found, expected))
    torch.testing.assert_close(*gradients, atol=1e-7, rtol=1e-7)


def test_tokens_after_an_answer_have_no_weight():
    """vLLM's log-prob there is -1 or missing, and an advantage of 0 must not become NaN."""
    batch = drawn([2, 4], seed=3, apart=0.5)
    batch.batch["advantages"][0, 2:] = 0.0
    batch.batch["rollout_log_probs"][0, 2:] = -torch.inf
    batch.batch["old_log_probs"][0, 2:] = -torch.inf
    changed, metrics = corrected(batch, CAP)
    assert changed.batch["advantages"][0, 2:].tolist() == [0.0, 0.0]
    counted = drawn([2, 4], seed=3, apart=0.5)
    logs = (counted.batch["old_log_probs"] - counted.batch["rollout_log_probs"])[[0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 2, 3]]
    assert metrics == pytest.approx({
        "rollout_correction/weight_mean": logs.exp().clamp(max=CAP).mean().item(),
        "rollout_correction/ratio_max": logs.exp().max().item(),
        "rollout_correction/capped_share": (logs.exp() > CAP).double().mean().item(),
    })  # fmt: skip


def test_a_rollout_without_error_changes_nothing_and_the_batch_stays():
    batch = drawn([3, 5], seed=1, apart=0.0)
    before = batch.batch["advantages"].clone()
    changed, metrics = corrected(batch, CAP)
    assert torch.equal(changed.batch["advantages"], before)
    assert metrics["rollout_correction/capped_share"] == 0 and metrics["rollout_correction/ratio_max"] == 1
    assert changed.batch["old_log_probs"] is batch.batch["old_log_probs"], "no other column is copied"
    far, _ = corrected(drawn([3, 5], seed=1, apart=2.0), CAP)
    assert not torch.equal(far.batch["advantages"], before) and torch.equal(batch.batch["advantages"], before)


def test_tokens_after_an_answer_have_no_part():
    batch = drawn([2, 4], seed=2, apart=0.5)
    _, metrics = corrected(batch, CAP)
    batch.batch["rollout_log_probs"][0, 2:] = -1e9
    changed, again = corrected(batch, CAP)
    assert again == metrics and changed.batch["advantages"].isfinite().all()


def test_ratios_do_not_overflow():
    far = truncated_ratios(torch.tensor([0.0, -1.0]), torch.tensor([-1e4, -1.0]), CAP)
    torch.testing.assert_close(far, torch.tensor([2.0, 1.0]))


@pytest.mark.parametrize("cap", [1.0, 1.5, 2.0, 3.0, 5.0, 10.0])
def test_share_at_the_cap_is_that_of_exact_ratios(cap):
    """The float32 log-probs of both sides have ratios that lie a few roundings below and above the cap."""
    at = torch.tensor(math.log(cap), dtype=torch.float32)
    near = [at]
    for direction in (-torch.inf, torch.inf):
        each = at
        for _ in range(4):
            each = torch.nextafter(each, torch.tensor(direction))
            near.append(each)
    for apart in near:
        old = torch.stack([torch.zeros(()), apart, torch.tensor(-1.0)])[None]
        rollout = torch.tensor([[0.0, 0.0, -1.0]])
        columns = {"old_log_probs": old, "rollout_log_probs": rollout, "advantages": torch.ones(1, 3)}
        batch = DataProto.from_dict(columns | {"attention_mask": torch.ones(1, 4, dtype=torch.long)})
        changed, metrics = corrected(batch, cap)
        exact = [float(each) for each in (old - rollout).flatten()]
        assert metrics["rollout_correction/capped_share"] == sum(each > math.log(cap) for each in exact) / 3
        assert changed.batch["advantages"].max() <= cap


def test_the_update_gets_the_corrected_batch_and_reports():
    batch, seen = drawn([2, 4], seed=3, apart=2.0), []

    def update_actor(given):
        seen.append(given)
        return SimpleNamespace(meta_info={"metrics": {"actor/pg_loss": 1.0}})

    metrics = correcting(update_actor, CAP)(batch).meta_info["metrics"]
    assert not torch.equal(seen[0].batch["advantages"], batch.batch["advantages"])
    assert metrics["actor/pg_loss"] == 1.0 and 0 < metrics["rollout_correction/capped_share"] < 1
    assert metrics["rollout_correction/weight_mean"] < CAP < metrics["rollout_correction/ratio_max"]


def test_what_it_needs_is_asked_for():
    check_configuration(compose("rehearsal", [SWITCH, RECOMPUTED]))
    with pytest.raises(ConfigurationError, match="recompute_old_log_prob=False does not compute them. Set that to"):
        check_configuration(compose("rehearsal", [SWITCH]))
    with pytest.raises(ConfigurationError, match="cap=0.5 is invalid: an exact rollout has the ratio 1"):
        cap = "actor_rollout_ref.overlay.rollout_correction.cap=0.5"
        check_configuration(compose("rehearsal", [SWITCH, RECOMPUTED, cap]))


@pytest.mark.parametrize(("key", "value", "remedy"), [("top_k", 50, -1), ("top_p", 0.9, 1.0)])
def test_ratios_of_two_vocabularies_rejected(key, value, remedy):
    narrowed = f"actor_rollout_ref.rollout.{key}={value}"
    says = f"rollout.{key}={value} is invalid with {SWITCH.partition('=')[0]}=true: .*Set it to {remedy}, or switch"
    with pytest.raises(ConfigurationError, match=says):
        check_configuration(compose("rehearsal", [SWITCH, RECOMPUTED, narrowed]))
    partial = "actor_rollout_ref.overlay.partial_rollout.enabled=true"
    with pytest.raises(ConfigurationError, match=says):
        check_configuration(compose("rehearsal", [SWITCH, RECOMPUTED, partial, narrowed]))
    check_configuration(compose("rehearsal", [narrowed]))
