"""MindSpeed's options are read from where a published script puts them: verl's actor's override_transformer_config."""

from copy import deepcopy

import pytest
from omegaconf import OmegaConf
from transformers import DeepseekV3Config

from overlay import ConfigurationError
from tests.post_training.models.published_configs import PUBLISHED_CONFIGS
from verl_patches.features.mindspeed.arguments import command_line, translate
from verl_patches.features.settings import OverlaySettings
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose

JOB = "deepseek_v3_256die_true_weight"
GROUP = "actor_rollout_ref.actor.megatron.override_transformer_config"
# As in the published script.
PUBLISHED = [
    f"+{GROUP}.use_flash_attn=True",
    f"+{GROUP}.moe_token_dispatcher_type='alltoall'",
    f"+{GROUP}.moe_grouped_gemm=True",
    f"+{GROUP}.use_fused_rotary_pos_emb=True",
    f"+{GROUP}.use_fused_swiglu=True",
    f"+{GROUP}.swap_optimizer=True",
]
OVERLAY = "actor_rollout_ref.overlay.mindspeed"
CLUSTER = ["actor_rollout_ref.model.path=/weights", "trainer.nnodes=16", "trainer.n_gpus_per_node=16"]
# transformers fills in rope_scaling in place.
MODEL = deepcopy(PUBLISHED_CONFIGS["deepseek-ai/DeepSeek-V3, edited"])


def composed(*overrides):
    return compose(JOB, [*CLUSTER, *overrides])


@pytest.mark.parametrize("engine", ["auto", "off"])
def test_published_options_start_the_job(engine):
    config = composed(*PUBLISHED, f"{OVERLAY}.swap_optimizer=false", f"{OVERLAY}.engine={engine}")
    settings = check_configuration(config, MODEL)
    assert settings.mindspeed.swap_optimizer and settings.mindspeed.fused_operators
    left = OmegaConf.select(config, GROUP)
    assert set(left) == {"num_layer_list", "moe_tp_extend_ep", "moe_token_dispatcher_type", "moe_grouped_gemm"}


def test_published_options_reach_mindspeeds_command_line():
    config = composed(*PUBLISHED, f"{OVERLAY}.swap_optimizer=false")
    settings = OverlaySettings.from_config(config.actor_rollout_ref)
    words = command_line(translate(config.actor_rollout_ref, DeepseekV3Config(**MODEL), settings))
    named = {line.split("=")[0].rpartition(".")[2].replace("_", "-") for line in PUBLISHED}
    assert {f"--{name}" for name in named} <= set(words)
    assert words[words.index("--moe-token-dispatcher-type") + 1] == "alltoall"


def test_options_that_are_off_are_translated_too():
    off = [f"+{GROUP}.use_fused_rotary_pos_emb=False", f"+{GROUP}.use_fused_swiglu=False"]
    settings = check_configuration(composed(*off, f"+{GROUP}.swap_optimizer=False"), MODEL).mindspeed
    assert not settings.fused_operators and not settings.swap_optimizer
    settings = check_configuration(composed(f"+{GROUP}.swap_optimizer_times=4"), MODEL).mindspeed
    assert settings.swap_optimizer_times == 4 and settings.fused_operators


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["use_fused_swiglu=False", "use_fused_rotary_pos_emb=True"], f"use_fused_swiglu=False .*{OVERLAY}.fused_op"),
        (["use_flash_attn=False"], "use_flash_attn=False is invalid: only the fused attention"),
        (["swap_optimizer=7"], "swap_optimizer=7 is invalid. Set it to True or False"),
    ],
)
def test_option_without_translation_rejected_by_its_key(overrides, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        composed(*(f"+{GROUP}.{each}" for each in overrides))
    assert str(caught.value).startswith(GROUP) and "\n" not in str(caught.value)


@pytest.mark.parametrize("role", ["reward_model", "critic"])
@pytest.mark.parametrize("name", ["swap_optimizer", "use_fused_swiglu"])
def test_option_of_another_model_names_the_overlays_key(role, name):
    own = "swap_optimizer" if name == "swap_optimizer" else "fused_operators"
    key = f"{role}.megatron.override_transformer_config"
    with pytest.raises(ConfigurationError, match=f"{key}.{name} is invalid: .*Set {OVERLAY}.{own}$"):
        composed(f"+{key}.{name}=True")


@pytest.mark.parametrize(("name", "value"), [("moe_token_dispatcher_type", "allgather"), ("moe_grouped_gemm", False)])
def test_dispatcher_that_mindspeed_is_not_given_rejected(monkeypatch, name, value):
    monkeypatch.setattr("verl_patches.features.mindspeed.feature.is_importable", lambda: True)
    config = composed(f"+{GROUP}.{name}={value}", f"{OVERLAY}.engine=on")
    with pytest.raises(ConfigurationError, match=f"{name}={value} is not translated for MindSpeed-LLM: set it to"):
        check_configuration(config, MODEL)
