"""verl's registry returns this project's model for DeepSeek-V3 and leaves the other models to upstream."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from verl_patches.models.mcore import registry
from verl_patches.models.weight_loader_registry import get_weight_saver
from verl_patches.utils.megatron_utils import get_transformer_layer_offset

DEEPSEEK_V3 = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"])
QWEN = SimpleNamespace(architectures=["Qwen2ForCausalLM"])


def arguments(*args, **kwargs):
    return args, kwargs


def never(*args, **kwargs):
    raise AssertionError("upstream must not be called")


def test_other_models_reach_upstream_unchanged():
    assert registry.hf_to_mcore_config(arguments, QWEN, "dtype", bf16=True) == ((QWEN, "dtype"), {"bf16": True})
    assert registry.init_mcore_model(arguments, "config", QWEN, True, False, value=True) == (
        ("config", QWEN, True, False),
        {"value": True},
    )
    assert registry.get_mcore_weight_converter(arguments, QWEN, "dtype") == ((QWEN, "dtype"), {})


def test_deepseek_v3_never_reaches_upstream():
    assert registry.get_mcore_weight_converter(never, DEEPSEEK_V3, "dtype") is None
    model = SimpleNamespace(build_deepseek_v3=lambda *args, **options: args)
    with mock.patch.dict(sys.modules, {"post_training.models.megatron.deepseek_v3_model": model}):
        built = registry.init_mcore_model(never, "config", DEEPSEEK_V3, True, False, value=True)
    assert built == ("config", DEEPSEEK_V3, True, False)


@pytest.mark.parametrize(
    ("architecture", "balanced"),
    [("DeepseekV3ForCausalLM", True), ("Qwen2ForCausalLM", False), ("Qwen3MoeForCausalLM", False), ("Other", False)],
)
def test_only_a_router_of_ours_is_told_to_deal_out_experts(architecture, balanced):
    """Upstream's configurations reject an unknown keyword."""
    model = SimpleNamespace(architectures=[architecture])
    told = registry.hf_to_balanced_config(arguments, model, "dtype", bf16=True)
    more = {"moe_router_force_load_balancing": True} if balanced else {}
    assert told == ((model, "dtype"), {"bf16": True, **more})


@pytest.mark.parametrize(("value", "last_stage"), [(True, True), (True, False), (False, True)])
def test_a_value_model_has_a_head_of_ours_on_its_last_stage(value, last_stage):
    head = SimpleNamespace(ValueHead=lambda config: f"head of {config}")
    with mock.patch.dict(sys.modules, {"post_training.models.megatron.value_head": head}):
        built = registry.init_value_model(
            lambda *args, **options: SimpleNamespace(output_layer="upstream's"),
            "config", DEEPSEEK_V3, True, last_stage, value=value,
        )  # fmt: skip
    assert built.output_layer == ("head of config" if value and last_stage else "upstream's")


@pytest.mark.parametrize("name", ["freeze_moe_router", "fix_moe_router"])
@pytest.mark.parametrize("frozen", [True, False])
def test_the_router_is_frozen_by_the_name_of_either_verl(name, frozen):
    model = SimpleNamespace(build_deepseek_v3=lambda *args, **options: options)
    with mock.patch.dict(sys.modules, {"post_training.models.megatron.deepseek_v3_model": model}):
        options = registry.init_mcore_model(never, "config", DEEPSEEK_V3, True, True, **{name: frozen})
    assert options == {"freeze_moe_router": frozen}


def test_layer_offset_comes_from_the_configuration_where_it_knows():
    uneven = SimpleNamespace(first_layer_of_stage=lambda stage: [0, 2][stage])
    assert get_transformer_layer_offset(never, 1, None, uneven) == 2
    assert get_transformer_layer_offset(arguments, 1, None, "even") == ((1, None, "even"), {})


def test_saving_deepseek_v3_for_huggingface_rejected_and_says_what_can_be_saved():
    assert get_weight_saver(arguments, "Qwen2ForCausalLM") == (("Qwen2ForCausalLM",), {})
    with pytest.raises(NotImplementedError, match="docs/weights.md lists what can be saved"):
        get_weight_saver(never, "DeepseekV3ForCausalLM")("model", dtype="bfloat16")
