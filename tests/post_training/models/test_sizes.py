"""Sizes that plans and counts derive from a config.json match the modules that transformers builds from it."""

from dataclasses import fields

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForVision2Seq

from post_training.models.families import families, sizes_of
from post_training.models.sizes import ModelSizes
from rehearsal.tiny_model.architecture import TINY_MODELS


def multiplied_by_a_token(config) -> int:
    """Count the matrix weights that a text token is multiplied by in transformers.

    Experts count by the share of them that a token uses; the embedding and the vision tower do not count.
    """
    with torch.device("meta"):
        kind = AutoModelForVision2Seq if hasattr(config, "vision_config") else AutoModelForCausalLM
        model = kind.from_config(config)
    met = 0
    for name, weight in model.named_parameters():
        if weight.dim() != 2 or name.endswith("embed_tokens.weight") or ".visual." in name:
            continue
        routed = ".experts." in name
        experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
        met += weight.numel() * config.num_experts_per_tok // experts if routed else weight.numel()
    return met


@pytest.mark.parametrize("model_type", sorted(TINY_MODELS))
def test_the_weights_that_a_token_meets_are_those_of_transformers_matrices(model_type):
    values = {**TINY_MODELS[model_type], "hidden_size": 96, "intermediate_size": 208, "vocab_size": 336}
    if "vision_config" in values:
        values["vision_config"] = {**values["vision_config"], "out_hidden_size": 96}
    config = AutoConfig.for_model(model_type, **values)
    assert sizes_of(values).weights_met == multiplied_by_a_token(config)


def test_what_only_models_with_experts_have_is_nothing_in_the_others():
    of_experts = {field.name for field in fields(ModelSizes) if field.default == 0}
    assert of_experts == {"experts", "experts_per_token", "expert_width", "shared_width"}
    dense = next(family for family in families() if family.architecture == "Qwen2ForCausalLM")
    sizes = sizes_of({"architectures": [dense.architecture], **next(iter(dense.published.values()))})
    assert {name: getattr(sizes, name) for name in of_experts} == dict.fromkeys(of_experts, 0)


def test_sizes_of_grouped_queries_are_those_of_the_definition():
    """Compare with hand-computed sizes of Qwen3-8B, whose head width is not hidden_size / heads."""
    family = next(family for family in families() if family.architecture == "Qwen3ForCausalLM")
    values = {"architectures": [family.architecture], **family.published["qwen3-8b"]} | {
        "max_position_embeddings": 40960
    }
    heads, kv_heads, width = 32, 8, 128
    assert sizes_of(values) == ModelSizes(
        hidden=4096,
        vocabulary=151936,
        layers=36,
        dense_layers=36,
        intermediate=12288,
        attention_weights=4096 * width * (heads + kv_heads + kv_heads + heads),
        score_width=heads * width + heads * width,
        keys_values=kv_heads * width + kv_heads * width,
        # q, k, v and the output; inputs of two rotations; 8 maxima and 8 sums in float32, counted in 2-byte elements.
        kept_by_heads=(2 * heads + 2 * kv_heads) * width + (heads + kv_heads) * width + heads * (8 + 8) * 2,
        kept_whole=0,
        cache_by_heads=kv_heads * (width + width),
        cache_whole=0,
        cache_heads=kv_heads,
        rollout_attention=0,
        rotary=40960 * width,
        mla=False,
    )


@pytest.mark.parametrize("tp, elements", [(1, 2048), (2, 1024), (8, 256), (16, 256)])
def test_ranks_beyond_the_key_heads_have_a_head_each(tp, elements):
    family = next(family for family in families() if family.architecture == "Qwen3ForCausalLM")
    values = {"architectures": [family.architecture], **family.published["qwen3-8b"]}
    assert sizes_of(values).cache(tp) == elements
