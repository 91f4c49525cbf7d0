"""verl's registry answers for DeepSeek-V3 with this project's model and leaves the others to upstream."""

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
    with pytest.raises(ValueError, match="value model"):
        registry.init_mcore_model(never, "config", DEEPSEEK_V3, True, True, value=True)


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


def test_saving_deepseek_v3_for_huggingface_is_refused_and_says_what_can_be_saved():
    assert get_weight_saver(arguments, "Qwen2ForCausalLM") == (("Qwen2ForCausalLM",), {})
    with pytest.raises(NotImplementedError, match="docs/weights.md says what can be saved"):
        get_weight_saver(never, "DeepseekV3ForCausalLM")("model", dtype="bfloat16")
