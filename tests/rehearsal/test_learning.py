"""The default rehearsal learns, and with a learning rate of 0 it does not: the user's command, shortened to 8 steps."""

import json
from pathlib import Path
from statistics import mean

import pytest
from omegaconf import DictConfig, OmegaConf

from overlay import Feature
from overlay.discovery import load
from overlay.pins import Pins
from post_training.plan.job import read_job
from post_training.plan.report import Machine, make_job_plan
from tests.rehearsal.command import rehearse
from verl_patches.features.measure.run_files import read_executed
from verl_patches.features.settings import OverlaySettings

STEPS = 8
# The mean of three steps (768 answers) varies by about 0.03 while the policy stays the same.
NOISE = 0.12


def learn(output: Path, *overrides: str) -> list[dict[str, float]]:
    """Rehearse with seed 1; return the metrics of every step."""
    rehearse(output, "--steps", str(STEPS), "--seed", "1", "--", *overrides)
    steps = [json.loads(line)["metrics"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == STEPS
    return steps


def rise(steps: list[dict[str, float]]) -> float:
    """Mean reward of the last three steps above that of the first three."""
    rewards = [step["critic/score/mean"] for step in steps]
    return mean(rewards[-3:]) - mean(rewards[:3])


def executed_with_their_feature_on(output: Path) -> set[str]:
    """The patches that ran in a rehearsal, less those whose feature was off and which only called upstream."""
    config = OmegaConf.load(output / "config.yaml")
    chosen = OverlaySettings.from_config(config.actor_rollout_ref)
    on = {patch.label for patch in load(Pins.read().rooms()) if is_on(patch.feature, config, chosen)}
    return on & set(read_executed(output))


def is_on(feature: Feature, config: DictConfig, chosen: OverlaySettings) -> bool:
    """Whether a feature is on; where the settings do not say it, its switch is a key of upstream's own."""
    of_upstream = feature.switch and feature.is_on(OverlaySettings.all_off())
    return feature.is_on(chosen) and not (of_upstream and OmegaConf.select(config, feature.switch) is False)


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory) -> tuple[Path, list[dict[str, float]]]:
    """The folder and the metrics of a rehearsal as the user starts it."""
    output = tmp_path_factory.mktemp("rehearsed") / "run"
    return output, learn(output)


@pytest.mark.slow
def test_the_reward_rises_with_the_patches_that_say_that_a_rehearsal_executes_them(rehearsed):
    output, steps = rehearsed
    assert rise(steps) > NOISE
    declared = {patch.label for patch in load(Pins.read().rooms()) if patch.evidence == "executed"}
    assert executed_with_their_feature_on(output) == declared


@pytest.mark.slow
def test_the_plan_predicts_the_memory_of_a_rehearsal(rehearsed):
    output, steps = rehearsed
    config = OmegaConf.to_container(OmegaConf.load(output / "config.yaml"), resolve=True)
    model = Path(config["actor_rollout_ref"]["model"]["path"]) / "config.json"
    predicted = make_job_plan(read_job(config, json.loads(model.read_text())), Machine(1 << 30)).device.phases
    measured = {phase: steps[-1][f"memory/peak_bytes/{phase}"] for phase in predicted}
    assert predicted == {phase: pytest.approx(peak, rel=0.1) for phase, peak in measured.items()}


@pytest.mark.slow
def test_without_a_learning_rate_the_policy_and_its_reward_stay(tmp_path):
    steps = learn(tmp_path / "run", "actor_rollout_ref.actor.optim.lr=0")
    assert all(step["actor/kl_loss"] == 0 for step in steps)
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    assert abs(rise(steps)) < NOISE
