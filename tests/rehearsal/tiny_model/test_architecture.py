"""The tiny models have every structural component of the published ones, and even widths."""

import json
from pathlib import Path

import pytest

from rehearsal.tiny_model.architecture import TINY_MODELS, VOCABULARY_SIZE, tiny_config

DEEPSEEK_V3 = json.loads((Path(__file__).parents[2] / "post_training" / "plan" / "deepseek_v3_config.json").read_text())
# Keys that may be smaller than in the published model without removing any of its parts.
SMALLER = {"hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
           "num_key_value_heads", "first_k_dense_replace", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
           "qk_rope_head_dim", "v_head_dim", "vocab_size", "max_position_embeddings", "num_nextn_predict_layers",
           "rope_scaling", "initializer_range"}  # fmt: skip


def test_the_tiny_deepseek_v3_differs_from_the_published_one_in_its_sizes_alone():
    tiny = TINY_MODELS["deepseek_v3"]
    shared = tiny.keys() & DEEPSEEK_V3.keys() - SMALLER
    assert {name: tiny[name] for name in shared} == {name: DEEPSEEK_V3[name] for name in shared}
    assert {"n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "scoring_func"} <= shared
    for name in SMALLER & tiny.keys() & DEEPSEEK_V3.keys() - {"rope_scaling", "initializer_range"}:
        assert tiny[name] <= DEEPSEEK_V3[name]


def test_its_yarn_stretches_a_context_to_that_of_the_model_as_the_published_one_does():
    for model in (TINY_MODELS["deepseek_v3"], DEEPSEEK_V3):
        scaling = model["rope_scaling"]
        assert scaling["factor"] * scaling["original_max_position_embeddings"] == model["max_position_embeddings"]
    tiny, published = TINY_MODELS["deepseek_v3"]["rope_scaling"], DEEPSEEK_V3["rope_scaling"]
    for name in ("type", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        assert tiny[name] == published[name]


@pytest.mark.parametrize("model_type", TINY_MODELS)
def test_every_width_is_a_multiple_of_16_on_each_of_two_ranks(model_type):
    sizes = {name: value for name, value in TINY_MODELS[model_type].items() if name.endswith(("_size", "_rank"))}
    assert sizes["vocab_size"] == VOCABULARY_SIZE
    assert all(value % 32 == 0 for value in sizes.values()), sizes
    heads = [TINY_MODELS[model_type][name] for name in ("num_attention_heads", "num_key_value_heads")]
    assert all(count % 2 == 0 for count in heads)


@pytest.mark.parametrize("model_type", TINY_MODELS)
def test_the_configuration_is_transformers_own_with_the_tokens_and_changes(model_type):
    config = tiny_config(1, 2, 3, model_type, num_hidden_layers=5)
    assert (config.model_type, config.num_hidden_layers) == (model_type, 5)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (1, 2, 3)
    assert config.hidden_size == TINY_MODELS[model_type]["hidden_size"]
