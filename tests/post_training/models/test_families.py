"""Families are found, say what they are, and nothing else names one."""

import re
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from post_training.models.families import families, family_of, find_family, sizes_of, table_for
from post_training.plan.placement_text import KNOWN
from post_training.report.flops import forward_flops

ROOT = Path(__file__).parents[3]
# Billions of parameters, and of those that a token meets, by the model's own card.
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
    """Lines of Python below a folder that name an architecture."""
    return [
        f"{path.name}: {line.strip()}"
        for path in sorted(folder.rglob("*.py"))
        for line in path.read_text().splitlines()
        if NAMED.search(line)
    ]


@pytest.mark.parametrize(
    "room",
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
def test_no_patch_tool_or_check_names_an_architecture(room):
    assert named_architectures(ROOT / room) == []


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
    with pytest.raises(ValueError, match="architecture Other; known are DeepseekV3ForCausalLM, "):
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
