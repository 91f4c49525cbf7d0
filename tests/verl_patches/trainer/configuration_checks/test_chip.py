"""The driver and a worker reject a job that an Atlas A2 cannot run, with the same sentence."""

from __future__ import annotations

import pytest

from post_training.chips import A2, A3
from tests.vllm_ascend_patches.test_ascend_forward_context import Exchange, chosen
from verl_patches.features.rollout_parallel.feature import SIZES_OF_A2
from verl_patches.trainer.configuration_checks import ConfigurationError, check_chip
from verl_patches.trainer.configuration_checks.values import resolved
from verl_patches.trainer.main_ppo import compose

LARGE = "deepseek_v3_256die_random_init"
SCALED = "+scale=emulated_8_dies"
SPREAD = "actor_rollout_ref.overlay.rollout.expert_parallel_size"


def config(*overrides: str, name: str = LARGE) -> dict:
    return resolved(compose(name, ["actor_rollout_ref.model.path=/model", *overrides]))


def test_large_job_in_graphs_on_few_dies_of_a2_rejected():
    given = config(SCALED)
    check_chip(given, A3)
    with pytest.raises(ConfigurationError) as caught:
        check_chip(given, A2)
    said = str(caught.value)
    assert "torchair_graph_config.enabled=true is invalid: experts are on 8 dies of an Atlas A2" in said
    assert "+graph=off" in said and "\n" not in said
    check_chip(config(SCALED, "+graph=off"), A2)


def test_number_of_dies_that_the_exchange_of_a2_does_not_take_rejected():
    given = config()
    assert given["actor_rollout_ref"]["overlay"]["rollout"]["expert_parallel_size"] in SIZES_OF_A2
    check_chip(given, A2)
    for graph in ([], ["+graph=off"]):
        with pytest.raises(ConfigurationError, match=rf"{SPREAD}=48 is invalid: .*needs 16, 32, 64"):
            check_chip(config(f"{SPREAD}=48", *graph), A2)


def test_jobs_without_experts_run_on_either_chip():
    for family in (A2, A3):
        check_chip(config(name="qwen2_5_1_5b_math_one_card"), family)
        check_chip(config(name="qwen2_5_0_5b_gsm8k"), family)


def test_chip_is_this_machines_unless_it_is_given(monkeypatch):
    monkeypatch.setenv("NPU_EMULATOR_CHIP", "Ascend910B2")
    with pytest.raises(ConfigurationError, match="Atlas A2"):
        check_chip(config(SCALED))
    monkeypatch.setenv("NPU_EMULATOR_CHIP", "Ascend910_9391")
    check_chip(config(SCALED))


def test_worker_on_a2_rejects_what_the_driver_rejects(monkeypatch):
    monkeypatch.setenv("NPU_EMULATOR_CHIP", "Ascend910B3")
    assert chosen(Exchange.All2All, in_graph=False) is Exchange.All2All
    assert chosen(Exchange.MC2, spread=16) is Exchange.MC2
    with pytest.raises(ConfigurationError) as worker:
        chosen(Exchange.All2All)
    with pytest.raises(ConfigurationError) as driver:
        check_chip(config(SCALED))
    assert str(worker.value) == str(driver.value)
