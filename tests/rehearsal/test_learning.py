"""The default rehearsal, shortened to 12 steps, learns; with a learning rate of 0 it does not."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from overlay.discovery import load
from overlay.pins import Pins
from post_training.plan.job import read_job
from post_training.plan.report import Machine, make_job_plan
from tests.rehearsal.command import rehearse
from tests.rehearsal.learning import NOISE, learn, rise
from verl_patches.features.measure.run_files import read_executed


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory) -> tuple[Path, list[dict[str, float]]]:
    """Folder and metrics of a rehearsal, started as by a user."""
    output = tmp_path_factory.mktemp("rehearsed") / "run"
    return output, learn(output)


@pytest.mark.slow
def test_the_reward_rises_with_the_patches_that_say_that_a_rehearsal_executes_them(rehearsed):
    output, steps = rehearsed
    assert rise(steps) > NOISE
    declared = {patch.label for patch in load(Pins.read().patch_packages()) if patch.evidence == "executed"}
    assert set(read_executed(output)) == declared


@pytest.mark.slow
def test_the_plan_predicts_the_memory_of_a_rehearsal(rehearsed):
    output, steps = rehearsed
    config = OmegaConf.to_container(OmegaConf.load(output / "config.yaml"), resolve=True)
    model = Path(config["actor_rollout_ref"]["model"]["path"]) / "config.json"
    # The plan assumes the longest answers; these were shorter, and the update packs them.
    tokens = round(steps[-1]["prompt_length/mean"] + steps[-1]["response_length/mean"])
    job = replace(read_job(config, json.loads(model.read_text())), sequence_tokens=tokens)
    predicted = make_job_plan(job, Machine(1 << 30)).device.phases
    measured = {phase: steps[-1][f"memory/peak_bytes/{phase}"] for phase in predicted}
    assert predicted == {phase: pytest.approx(peak, rel=0.1) for phase, peak in measured.items()}


@pytest.mark.exhaustive
def test_the_policy_learns_with_a_critic_which_learns_too(tmp_path):
    steps = learn(tmp_path / "run", "+recipe=ppo")
    losses = [step["critic/vf_loss"] for step in steps]
    assert rise(steps) > NOISE
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    assert not any(step["critic/nonfinite_steps"] for step in steps)


@pytest.mark.exhaustive
def test_late_in_a_run_most_groups_carry_a_gradient_with_dapo_and_few_without(tmp_path):
    """Compare the last five of 25 steps, when plain GRPO answers many prompts with correct answers only."""
    shares = {}
    for recipe in ("grpo", "dapo"):
        output = tmp_path / recipe
        rehearse(output, "--seed", "1", "--recipe", recipe)
        summary = json.loads((output / "summary.json").read_text())
        shares[recipe] = summary["groups_with_gradient"]
        assert summary["trained_prompts"] == 25 * 32 and 0 <= summary["truncated_share"] < 1
        assert (summary["generated_prompts"] > summary["trained_prompts"]) == (recipe == "dapo")
    print(shares)
    assert shares["grpo"] < 0.6 and shares["dapo"] >= 0.9, shares


@pytest.mark.exhaustive
def test_reward_stays_without_a_learning_rate(tmp_path):
    steps = learn(tmp_path / "run", "actor_rollout_ref.actor.optim.lr=0")
    assert all(step["actor/kl_loss"] == 0 for step in steps)
    assert abs(rise(steps)) < NOISE


@pytest.mark.exhaustive
@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_answers_that_go_on_keep_the_log_probs_that_they_were_sampled_with(tmp_path, rate):
    """With constant weights, tokens of earlier steps pass the float32 check; the control, with training, fails it."""
    overlay, output = "actor_rollout_ref.overlay", tmp_path / "run"
    settings = [
        f"{overlay}.partial_rollout.enabled=true", f"{overlay}.partial_rollout.threshold=0.5",
        f"{overlay}.rollout_correction.enabled=true", "actor_rollout_ref.actor.recompute_old_log_prob=true",
        f"{overlay}.dp_sync.lease_steps=1", f"{overlay}.precision=float32", f"actor_rollout_ref.actor.optim.lr={rate}",
    ]  # fmt: skip
    with nullcontext() if rate == 0 else pytest.raises(AssertionError, match="log-probs"):
        rehearse(output, "--steps", "3", "--", *settings)
    records = [json.loads(line)["metrics"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert max(record["partial_rollout/old_share"] for record in records) > 0.5
    differences = [record["training/rollout_probs_diff_max"] for record in records]
    assert differences[0] < 1e-5 and (max(differences) < 1e-5) == (rate == 0)
