"""The rule reward as verl loads it: by path, once for training and once for validation."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from post_training.rewards import batch, process, verifier
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


@pytest.fixture
def adapter(monkeypatch):
    """Execute the file as verl does. Return its names, and the calls to a fake pool and fake verifiers."""
    done = []
    pool = SimpleNamespace(prepare=lambda: done.append("prepared"), resize=lambda size: done.append(size))
    monkeypatch.setattr(process, "shared_pool", lambda: pool)
    monkeypatch.setattr(verifier, "Verifier", lambda *given, **named: done.append((given, named)) or "verifier")
    monkeypatch.setattr(batch, "declare_safe_for_threads", lambda: done.append("safe"))
    monkeypatch.setattr("post_training.rewards.score", lambda *given: done.append(given) or 0.9)
    return runpy.run_path(str(ADAPTER)), done


def test_limits_of_the_configuration_reach_the_algebra(adapter):
    functions, done = adapter
    assert done == ["prepared", "safe"]
    sample = {"data_source": "own", "solution_str": "7", "ground_truth": 7, "extra_info": {"n": 1}}
    limits = {"time_limit_s": 2.0, "budget_s": 30.0, "workers": 1}
    assert functions["compute_score"](**sample, rule="geo3k", **limits) == 0.9
    assert done[2:] == [1, ((2.0,), {"budget_s": 30.0}), ("7", "7", "verifier", "geo3k")]
    # One verifier serves all answers; another limit makes a new one, and without `workers` the pool keeps its size.
    functions["compute_score"](**sample, **limits)
    functions["compute_score"](**sample)
    assert done[5:] == [
        ("7", "7", "verifier", "boxed"), ((5.0,), {"budget_s": 600.0}), ("7", "7", "verifier", "boxed"),
    ]  # fmt: skip


def test_accuracy_is_the_answers_and_format_the_rules(adapter):
    functions, _ = adapter
    sample = {"data_source": "own", "solution_str": "<think>a</think>7", "ground_truth": "7"}
    assert functions["compute_score_and_accuracy"](**sample, rule="geo3k") == {"score": 0.9, "acc": 1.0}
    assert functions["compute_score_and_accuracy"](**sample) == {"score": 0.9, "acc": 0.9}
    found = functions["compute_score_and_format"](**sample, rule="geo3k")
    assert found == {"score": 0.9, "acc": 1.0, "format": 0.0}
    assert functions["compute_score_and_format"](**sample, rule="substring")["format"] == 1.0
