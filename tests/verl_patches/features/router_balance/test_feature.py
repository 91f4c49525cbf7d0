"""The key of overlay.router_balance: when it is on, and the jobs for which it is rejected."""

import json

import pytest

from overlay import ConfigurationError, SettingsError
from rehearsal.tiny_model.architecture import TINY_MODELS
from verl_patches.features.router_balance.feature import ROUTER_BALANCE
from verl_patches.features.settings import OverlaySettings
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose

RANDOM_WEIGHTS = "actor_rollout_ref.actor.load_weight=false"
FORCED = f"{ROUTER_BALANCE.switch}=true"


def check(*overrides):
    return check_configuration(compose("rehearsal", list(overrides)))


def test_it_is_off_unless_asked_for():
    assert not OverlaySettings().router_balance.forced and not ROUTER_BALANCE.is_on(check())
    assert ROUTER_BALANCE.is_on(check(FORCED, RANDOM_WEIGHTS))


def test_weights_that_are_read_are_not_trained_with_it():
    with pytest.raises(
        ConfigurationError, match="router_balance.forced=True sends .*load_weight=True reads weights. Set"
    ):
        check(FORCED)


def test_a_model_without_such_a_router_rejected(tmp_path):
    def of_type(name):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **TINY_MODELS[name]}))
        return check(FORCED, RANDOM_WEIGHTS, f"actor_rollout_ref.model.path={tmp_path}")

    assert of_type("deepseek_v3").router_balance.forced
    with pytest.raises(ConfigurationError, match=r"balances the routers of DeepseekV3.*\['Qwen3MoeForCausalLM'\]. Set"):
        of_type("qwen3_moe")


def test_another_value_is_an_error():
    with pytest.raises(SettingsError, match="router_balance.forced=1 is invalid. Set it to a value of type bool"):
        check(f"{ROUTER_BALANCE.switch}=1")
