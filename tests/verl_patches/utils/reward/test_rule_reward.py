"""The rule reward as verl loads it: by path, once for training and once for validation."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from post_training.rewards.process import shared_pool

ADAPTER = Path(__file__).parents[4] / "verl_patches" / "utils" / "reward" / "rule_reward.py"


def loaded(**options):
    from verl.trainer.ppo.reward import get_custom_reward_fn

    node = {"path": str(ADAPTER), "name": "compute_score", "reward_kwargs": options}
    return get_custom_reward_fn(OmegaConf.create({"custom_reward_function": node}))


@pytest.fixture
def closing():
    yield
    shared_pool().close()


@pytest.mark.slow
def test_rules_start_their_processes_before_the_first_sample(closing):
    shared_pool().close()
    training, validation = loaded(), loaded(rule="substring", time_limit_s=2)
    started = [each._process for each in shared_pool()._all]
    assert len(started) == shared_pool().size and all(process.poll() is None for process in started)
    sample = {"data_source": "own", "solution_str": r"12 or \boxed{\frac{4}{8}}", "extra_info": None}
    assert training(**sample, ground_truth="0.5") == 1.0
    assert validation(**sample, ground_truth="0.5") == 0.0
    assert validation(**sample, ground_truth="2") == 1.0
    assert training(**sample | {"solution_str": r"\boxed{x+1}"}, ground_truth="1+x") == 1.0
    assert training(**sample, ground_truth=12) == 0.0
    assert [each._process for each in shared_pool()._all] == started
