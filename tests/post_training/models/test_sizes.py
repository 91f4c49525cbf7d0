"""What plans and counts take from a config.json, against the modules that transformers makes of it."""

from dataclasses import fields

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForVision2Seq

from post_training.models.families import families, sizes_of
from post_training.models.sizes import ModelSizes
from rehearsal.tiny_model.architecture import TINY_MODELS


def multiplied_by_a_token(config) -> int:
    """Weights of transformers' matrices that a token of text meets: of an expert's its share, the embedding none."""
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
