"""Model families: they are discovered, they describe themselves, and no other code names an architecture."""

import re
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from post_training.models.families import (
    check_sizes,
    families,
    family_of,
    find_family,
    sizes_of,
    table_for,
    variant_findings,
)
from post_training.plan.placement_text import KNOWN
from post_training.report.flops import forward_flops

ROOT = Path(__file__).parents[3]
# Billions of total and activated parameters, from each model card.
PUBLISHED = {
    "deepseek-v3": (671, 37),
    "qwen2.5-0.5b": (0.49, 0.49),
    "qwen3-8b": (8.2, 8.2),
    "qwen3-32b": (32.8, 32.8),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
}
NAMED = re.compile(r"\b\w+ForCausalLM\b")


def named_architectures(folder: Path) -> list[str]:
    """Return the lines of Python below `folder` that name an architecture."""
    return [
        f"{path.name}: {line.strip()}"
        for path in sorted(folder.rglob("*.py"))
        for line in path.read_text().splitlines()
        if NAMED.search(line)
    ]


@pytest.mark.parametrize(
    "area",
    [
        "megatron_patches",
        "mindspeed_patches",
        "overlay",
        "scripts",
        "verl_patches",
        "vllm_ascend_patches",
        "vllm_patches",
    ],
)
def test_no_patch_tool_or_check_names_an_architecture(area):
    assert named_architectures(ROOT / area) == []


def test_only_the_folder_of_the_families_names_them():
    others = [path for path in (ROOT / "post_training").iterdir() if path.is_dir() and path.name != "models"]
    assert others and [line for folder in others for line in named_architectures(folder)] == []
    assert named_architectures(ROOT / "post_training" / "models")


def test_the_published_models_have_the_parameters_that_their_cards_say():
    found = {name: (family, values) for family in families() for name, values in family.published.items()}
    assert found.keys() == PUBLISHED.keys() == KNOWN.keys()
    for name, (whole, active) in PUBLISHED.items():
        family, values = found[name]
        elements = sum(prod(shape) for shape in family.table(values).shapes.values())
        assert elements / 1e9 == pytest.approx(whole, rel=0.01)
        if "num_experts_per_tok" in values:
            met = forward_flops({"architectures": [family.architecture], **values}, 1e-6) / 2e-6
            embedding = values["hidden_size"] * values["vocab_size"]
            assert (met + embedding) / 1e9 == pytest.approx(active, rel=0.02)


def test_a_family_is_found_by_architecture_before_type():
    assert find_family({"architectures": ["Qwen3ForCausalLM"], "model_type": "deepseek_v3"}).name == "Qwen3"
    assert find_family(SimpleNamespace(architectures=["DeepseekV3ForCausalLM"])).name == "DeepSeek-V3"
    assert find_family({"model_type": "qwen3_moe"}).name == "Qwen3-MoE"
    assert find_family({}) is None and find_family({"architectures": ["Qwen3Other"], "model_type": "qwen3"}) is None
    with pytest.raises(ValueError, match="architecture Other. Known are DeepseekV3ForCausalLM, "):
        family_of({"architectures": ["Other"]})


@pytest.mark.parametrize(
    "values, sentence",
    [
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, "needs attention_bias=False"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]}, "needs experts in every layer"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 2}, "needs experts in every layer"),
    ],
)
def test_a_variant_without_a_layout_rejected_in_one_sentence(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        table_for(values)


def test_sizes_that_are_missing_are_named():
    with pytest.raises(ValueError, match="config.json of Qwen3MoeForCausalLM lacks 'num_experts'"):
        sizes_of({"architectures": ["Qwen3MoeForCausalLM"]})


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    "given, key",
    [
        ({}, None),
        ({"hidden_act": "silu", "attention_dropout": 0.0, "use_sliding_window": False}, None),
        *(({"hidden_act": name}, "hidden_act") for name in ("gelu", "gelu_new", "relu")),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"dual_chunk_attention_config": {"chunk_size": 1}}, "dual_chunk_attention_config"),
        *(
            ({"max_position_embeddings": value}, "max_position_embeddings")
            for value in (0, -1, True, 256.0, "256", None)
        ),
    ],
)
def test_value_that_cannot_be_trained_is_named_alone(given, key):
    config = QWEN3 | given
    found = [sentence.partition("=")[0] for sentence in variant_findings(family_of(config), config)]
    assert found == ([] if key is None else [key])


def test_kinds_of_rotation_are_those_of_whoever_builds_the_model():
    """verl builds dense Qwen on Megatron, which supports linear position scaling or none."""
    found = {family.name: family.rotary for family in families()}
    assert found["Qwen2.5"] == found["Qwen3"] == {"default", "linear"}
    assert found["DeepSeek-V3"] == {"default", "yarn"} and found["Qwen3-MoE"] == {"default"}


@pytest.mark.parametrize("value", [True, 1.0, "1", 0, -1, 1 << 20, [1]])
def test_size_that_no_model_has_is_named(value):
    check_sizes({"num_attention_heads": 1, "head_dim": None, "n_shared_experts": 0})
    for key in ("num_attention_heads", "num_key_value_heads"):
        with pytest.raises(
            ValueError, match=f"^config.json: {key}=.* is invalid: no model has this value. Set it to a number"
        ):
            check_sizes({key: value})
    with pytest.raises(ValueError, match="num_attention_heads=None is invalid"):
        check_sizes({"num_attention_heads": None})


@pytest.mark.parametrize(
    "layers, prefixes", [(0, ()), (1, ("model.layers.3.",)), (2, ("model.layers.3.", "model.layers.4."))]
)
def test_layers_for_prediction_follow_the_models_in_files(layers, prefixes):
    family = next(family for family in families() if family.name == "DeepSeek-V3")
    values = family.published["deepseek-v3"] | {"num_hidden_layers": 3, "num_nextn_predict_layers": layers}
    table = table_for({"architectures": [family.architecture], **values})
    assert table.ignored_in_files == prefixes
    hidden, vocabulary = values["hidden_size"], values["vocab_size"]
    own = table.prediction_layer(3)
    assert own["model.layers.3.eh_proj.weight"] == (hidden, 2 * hidden)
    assert own["model.layers.3.shared_head.head.weight"] == (vocabulary, hidden)
    assert all(name.startswith("model.layers.3.") for name in own)
