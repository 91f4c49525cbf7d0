"""Rotary scalings of published models: the checks accept those on which transformers, vLLM and Megatron agree.

The references are the tables that they compute themselves, at the positions of `positions()`.
"""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch_npu  # noqa: F401
from transformers import AutoConfig, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import post_training.models.deepseek_v3 as deepseek_v3
from post_training.models.megatron.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from post_training.models.rotary_scaling import (
    Rotation,
    UnsupportedScaling,
    by_megatron,
    by_transformers,
    by_vllm,
    difference,
)

HEAD = 64
QWEN_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def qwen(scaling, longest=32768, **values):
    return {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "max_position_embeddings": longest,
        "rope_scaling": scaling,
    } | values


# Name -> values of a config.json. The yarn values "of its card" are from Qwen's model cards.
GRID = {
    "qwen2.5 as published": qwen(None),
    "qwen2.5 yarn of its card": qwen(QWEN_YARN),
    "qwen2.5 yarn, longest 131072": qwen(QWEN_YARN, 131072),
    "qwen3 yarn of its card": qwen(QWEN_YARN | {"rope_type": "yarn"}, 40960, model_type="qwen3"),
    "yarn with another ramp": qwen(QWEN_YARN | {"beta_fast": 16, "beta_slow": 2}, 131072),
    "yarn, attention_factor": qwen(QWEN_YARN | {"attention_factor": 1.25}, 131072),
    "yarn, attn_factor": qwen(QWEN_YARN | {"attn_factor": 0.5}, 131072),
    "yarn, mscale": qwen(QWEN_YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}, 131072),
    "llama 3.1": qwen(LLAMA3, 131072, model_type="llama", rope_theta=5e5),
    "llama 3.2": qwen(LLAMA3 | {"factor": 32.0}, 131072, model_type="llama", rope_theta=5e5),
    "linear": qwen({"type": "linear", "factor": 2.0}, 4096),
    "dynamic": qwen({"rope_type": "dynamic", "factor": 2.0}, 4096),
    "dynamic without growth": qwen({"rope_type": "dynamic", "factor": 1.0}, 4096),
}
AGREED = set(GRID) - {
    "qwen2.5 yarn of its card",
    "qwen3 yarn of its card",
    "yarn, attention_factor",
    "yarn, attn_factor",
    "yarn, mscale",
    "dynamic",
}


def table_of_transformers(model):
    kinds = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
    values = {name: value for name, value in model.items() if name != "model_type"}
    config = kinds[model["model_type"]](hidden_size=4 * HEAD, num_attention_heads=4, head_dim=HEAD, **values)
    cosine, sine = LlamaRotaryEmbedding(config)(torch.zeros(1), positions()[None])
    return torch.cat((cosine[0, :, : HEAD // 2], sine[0, :, : HEAD // 2]), -1)


def table_of_vllm(model, head=HEAD):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.transformers_utils.config import patch_rope_scaling_dict

    scaling = dict(model["rope_scaling"]) if model["rope_scaling"] else None
    if scaling:
        patch_rope_scaling_dict(scaling)
        if model["model_type"] == "deepseek_v3":
            scaling["rope_type"] = "deepseek_yarn"  # like vLLM's and vLLM-Ascend's models
    on_host = mock.patch.object(rotary_embedding, "current_platform", SimpleNamespace(device_type="cpu"))
    with set_current_vllm_config(VllmConfig()), on_host:
        longest, base = model["max_position_embeddings"], model["rope_theta"]
        found = rotary_embedding.get_rope(head, head, longest, base, True, scaling, torch.float32)
    return found.cos_sin_cache.cpu()[positions()]


def positions():
    return torch.cat((torch.arange(64), torch.arange(4032, 4096)))


@pytest.mark.parametrize("name", GRID)
def test_fsdp_accepts_what_both_sides_rotate_alike(name):
    trained, served = by_transformers(GRID[name]), by_vllm(GRID[name])
    apart = (table_of_transformers(GRID[name]) - table_of_vllm(GRID[name])).abs().max().item()
    assert (difference(trained, served) is None) == (name in AGREED)
    assert apart < 2e-3 if name in AGREED else apart > 2e-2


def amplitude_and_factor(table, base, head=HEAD):
    """Return the scale of a cosine and sine table, and the factor by which its slowest plane is slowed down."""
    amplitude = table[0, 0].item()
    angle = math.asin(table[-1, -1].item() / amplitude) / int(positions()[-1])
    return amplitude, base ** -((head - 2) / head) / angle


@pytest.mark.parametrize("name", GRID)
def test_rotation_is_what_the_tables_hold(name):
    model = GRID[name]
    sides = [(by_transformers(model), table_of_transformers(model)), (by_vllm(model), table_of_vllm(model))]
    for rotation, table in sides:
        found = amplitude_and_factor(table, model["rope_theta"])
        assert found[0] == pytest.approx(rotation.amplitude, rel=1e-4)
        if rotation.kind != "dynamic":  # dynamic scaling changes the base
            assert found[1] == pytest.approx(dict(rotation.numbers).get("factor", 1.0), rel=2e-3)


@pytest.mark.parametrize("coefficients", [(1.0, 1.0), (0.707, 1.0), (1.0, 0.707), (1.0, 0.0)])
def test_deepseeks_coefficients_scale_every_table_alike(coefficients):
    scaling = DEEPSEEK_YARN | dict(zip(("mscale", "mscale_all_dim"), coefficients, strict=True))
    model = {"rope_theta": 10000.0, "max_position_embeddings": 163840, "rope_scaling": scaling}
    model |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    names = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    own = YarnRotaryEmbedding(HEAD, 1e4, original_context=4096, **{name: scaling[name] for name in names})
    cosine, sine = own(positions(), torch.float32)
    megatrons = torch.cat((cosine[:, 0, : HEAD // 2], sine[:, 0, : HEAD // 2]), -1)
    sides = [
        (by_megatron(model, deepseek_v3.FAMILY.megatron.rotary), megatrons),
        (by_vllm(model), table_of_vllm(model)),
    ]
    for rotation, table in sides:
        found = amplitude_and_factor(table, model["rope_theta"])
        assert found[0] == pytest.approx(rotation.amplitude, rel=1e-4)
        assert found[1] == pytest.approx(dict(rotation.numbers)["factor"], rel=2e-3)


def test_deepseek_of_megatron_is_vllms():
    model = {"rope_theta": 10000.0, "max_position_embeddings": 163840, "rope_scaling": DEEPSEEK_YARN}
    model |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    kinds = deepseek_v3.FAMILY.megatron.rotary
    names = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    own = YarnRotaryEmbedding(64, 1e4, original_context=4096, **{name: DEEPSEEK_YARN[name] for name in names})
    cosine, sine = own(positions(), torch.float32)
    assert difference(by_megatron(model, kinds), by_vllm(model)) is None
    table = torch.cat((cosine[:, 0, :32], sine[:, 0, :32]), -1)
    assert (table - table_of_vllm(model, 64)).abs().max() < 2e-3
    odd = model | {"rope_scaling": DEEPSEEK_YARN | {"attn_factor": 0.5}}
    assert difference(by_megatron(odd, kinds), by_vllm(odd)) == ("attention factor", 1.0, 0.5)


def test_deepseek_without_coefficients_has_its_own_defaults():
    """The defaults are mscale=1 and mscale_all_dim=0, as in vLLM's DeepseekScalingRotaryEmbedding."""
    scaling = {name: value for name, value in DEEPSEEK_YARN.items() if not name.startswith("mscale")}
    model = {"rope_theta": 1e4, "rope_scaling": scaling, "architectures": ["DeepseekV3ForCausalLM"]}
    for rotation in (by_vllm(model), by_megatron(model, deepseek_v3.FAMILY.megatron.rotary)):
        assert rotation.amplitude == pytest.approx(0.1 * math.log(40) + 1)


def test_qwens_own_yarn_differs_by_the_factor():
    model = GRID["qwen2.5 yarn of its card"]
    assert difference(by_transformers(model), by_vllm(model)) == ("factor", 1.0, 4.0)
    assert by_vllm(model).amplitude == pytest.approx(1.1386, abs=1e-4)


def test_megatron_of_verl_interpolates_linearly_alone():
    kinds = frozenset({"default", "linear"})
    linear = GRID["linear"]
    assert difference(by_megatron(linear, kinds), by_vllm(linear)) is None
    for name in ("qwen2.5 yarn, longest 131072", "llama 3.1"):
        with pytest.raises(
            UnsupportedScaling, match=r"no (yarn|llama3) scaling. Set rope_scaling to null, or to linear"
        ):
            by_megatron(GRID[name], kinds)
    with pytest.raises(UnsupportedScaling, match="no linear scaling. Set rope_scaling to null in"):
        by_megatron(linear, frozenset({"default"}))


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"factor": 4.0}, "name none. Set rope_type"),
        ({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "name linear and yarn"),
        (
            {"rope_type": "yarn", "factor": 4.0},
            "original_max_position_embeddings=None is invalid: not a positive number",
        ),
        ({"rope_type": "linear", "factor": "2"}, "factor=2 is invalid: not a positive number"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "compute longrope scaling differently"),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, "mrope_section is only for models with images"),
    ],
)
def test_scaling_that_a_side_lacks_rejected(scaling, says):
    for side in (by_transformers, by_vllm):
        with pytest.raises(UnsupportedScaling, match=says):
            side(qwen(scaling))


def test_mrope_of_models_with_images_accepted():
    model = qwen({"type": "mrope", "mrope_section": [16, 24, 24]}, model_type="qwen2_5_vl")
    assert AutoConfig.for_model(**model).rope_scaling["rope_type"] == "default"
    assert by_transformers(model) == by_vllm(model) == Rotation("default", 1e6)
