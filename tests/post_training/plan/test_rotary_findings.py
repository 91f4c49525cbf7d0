"""A rope_scaling that training and rollout interpret differently is rejected before anything starts."""

import json

import pytest

from overlay import ConfigurationError
from tests.post_training.models.published_configs import PUBLISHED_CONFIGS
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose

FSDP, MEGATRON = "qwen2_5_0_5b_gsm8k", "rehearsal"
PATH = "actor_rollout_ref.model.path=/model"
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
TRANSFORMER = "actor_rollout_ref.actor.megatron.override_transformer_config"
# A dense model, built by verl.
BY_VERL = [
    f"~{TRANSFORMER}.num_layer_list",
    f"~{TRANSFORMER}.moe_tp_extend_ep",
    "actor_rollout_ref.overlay.rollout.expert_parallel_size=1",
]
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
# The published config.json with the lines that its model card recommends.
QWEN = PUBLISHED_CONFIGS["Qwen/Qwen2.5-7B-Instruct"] | {"max_position_embeddings": 32768, "rope_scaling": YARN}
REMEDY = "Set max_position_embeddings=131072 in config.json"


def check(job, model, *overrides):
    check_configuration(compose(job, [PATH, *overrides]), model)


def test_qwens_own_yarn_rejected_on_fsdp():
    with pytest.raises(ConfigurationError) as raised:
        check(FSDP, QWEN)
    assert str(raised.value) == (
        f"config.json's rope_scaling={json.dumps(QWEN['rope_scaling'])} is invalid: training uses 1.0 as its factor, "
        "but the rollout 4.0, so their models differ. "
        f"{REMEDY}, which is factor x original_max_position_embeddings"
    )


def test_the_remedy_is_accepted_on_fsdp():
    check(FSDP, QWEN | {"max_position_embeddings": 131072})
    check(FSDP, QWEN, "+actor_rollout_ref.model.override_config.max_position_embeddings=131072")
    check(FSDP, QWEN | {"rope_scaling": None})


def test_scaling_of_one_side_alone_rejected():
    plain = QWEN | {"rope_scaling": None}
    given = f"+{ENGINE}.hf_overrides={{rope_scaling:{{rope_type:linear,factor:2.0}}}}"
    with pytest.raises(ConfigurationError, match="training uses default as its rope_type, but the rollout linear"):
        check(FSDP, plain, given)
    with pytest.raises(ConfigurationError, match="training uses 1000000.0 as its rope_theta, but the rollout 500000"):
        check(FSDP, plain, f"+{ENGINE}.rope_theta=500000.0")


def test_dynamic_scaling_rejected_with_its_remedy():
    with pytest.raises(ConfigurationError, match="the rollout dynamic.* Set rope_scaling in config.json to null"):
        check(FSDP, QWEN | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})


def test_model_of_verl_on_megatron_takes_linear_alone():
    check(MEGATRON, QWEN | {"rope_scaling": {"type": "linear", "factor": 2.0}}, *BY_VERL)
    with pytest.raises(ConfigurationError, match="Megatron's Qwen2.5 supports only linear. Set rope_scaling to null"):
        check(MEGATRON, QWEN, *BY_VERL)


def test_experts_of_qwen3_on_megatron_take_none():
    model, layers = PUBLISHED_CONFIGS["Qwen/Qwen3-30B-A3B"], f"{TRANSFORMER}.num_layer_list=[24,24]"
    check(MEGATRON, model, layers)
    with pytest.raises(ConfigurationError, match="Qwen3-MoE does not support it. Set rope_scaling to null"):
        check(MEGATRON, model | {"rope_scaling": YARN}, layers)
