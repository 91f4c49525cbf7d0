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
def test_verl_loads_the_rules_and_starts_one_process_before_the_first_sample(closing):
    shared_pool().close()
    training, validation = loaded(), loaded(rule="substring", time_limit_s=2)
    (only,) = shared_pool()._all
    process = only._process
    assert process is not None and process.poll() is None
    sample = {"data_source": "own", "solution_str": r"12 or \boxed{\frac{4}{8}}", "extra_info": None}
    assert training(**sample, ground_truth="0.5") == 1.0
    assert validation(**sample, ground_truth="0.5") == 0.0
    assert validation(**sample, ground_truth="2") == 1.0
    assert training(**sample | {"solution_str": r"\boxed{x+1}"}, ground_truth="1+x") == 1.0
    assert training(**sample, ground_truth=12) == 0.0
    assert only._process is process and shared_pool()._all == [only]
