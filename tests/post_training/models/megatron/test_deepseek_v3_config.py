"""The typed configuration rejects unsupported settings, and places layers on uneven stages."""

import pytest
from transformers import DeepseekV3Config

import verl_patches.prelude_patch  # noqa: F401
from post_training.models.families import variant_findings
from rehearsal.tiny_model.architecture import TINY_MODELS

BASE = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "add_bias_linear": False,
    "num_moe_experts": 16,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk": 4,
    "first_k_dense_replace": 1,
}


def make(**changes):
    from post_training.models.megatron.deepseek_v3_config import DeepseekV3TransformerConfig

    return DeepseekV3TransformerConfig(**{**BASE, **changes})


def test_uneven_stages_place_every_layer_once():
    config = make(pipeline_model_parallel_size=2, pipeline_dtype=float, num_layer_list=[2, 1])
    placed = [
        list(
            range(
                config.first_layer_of_stage(stage), config.first_layer_of_stage(stage) + config.layers_on_stage(stage)
            )
        )
        for stage in range(2)
    ]
    assert placed == [[0, 1], [2]]


def test_even_stages_need_no_list():
    config = make(num_layers=4, pipeline_model_parallel_size=2, pipeline_dtype=float)
    assert [config.first_layer_of_stage(stage) for stage in range(2)] == [0, 2]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pipeline_model_parallel_size": 2}, "Set num_layer_list"),
        ({"pipeline_model_parallel_size": 2, "num_layer_list": [3]}, "must name 2 pipeline stages"),
        ({"pipeline_model_parallel_size": 2, "num_layer_list": [2, 2]}, "add up to 3"),
        ({"pipeline_model_parallel_size": 2, "num_layer_list": [3, 0]}, "must be positive"),
        ({"moe_tp_extend_ep": False}, "not supported"),
        ({"expert_model_parallel_size": 3}, "do not divide over TP x EP"),
        ({"tensor_model_parallel_size": 2}, "sequence_parallel=True"),
        ({"moe_router_num_groups": 3}, "do not divide into 3 groups"),
        ({"moe_router_group_topk": 5}, "moe_router_group_topk"),
        ({"moe_router_topk": 9}, "moe_router_topk exceeds"),
        ({"context_parallel_size": 2}, "context_parallel_size"),
        (
            {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "num_layer_list": [1, 2]},
            "needs experts in every stage",
        ),
    ],
)
def test_impossible_combinations_rejected(changes, sentence):
    if "pipeline_model_parallel_size" in changes:
        changes = {**changes, "pipeline_dtype": float}
    with pytest.raises(ValueError, match=sentence):
        make(**changes)


def test_unknown_field_is_an_error():
    with pytest.raises(TypeError, match="num_layers_list"):
        make(num_layers_list=[2, 1])


def test_the_defaults_are_those_of_the_published_model():
    from transformers import DeepseekV3Config

    config, published = make(), DeepseekV3Config()
    assert (config.q_lora_rank, config.kv_lora_rank) == (published.q_lora_rank, published.kv_lora_rank)
    assert (config.qk_head_dim, config.qk_pos_emb_head_dim) == (published.qk_nope_head_dim, published.qk_rope_head_dim)
    assert (config.v_head_dim, config.rotary_base) == (published.v_head_dim, published.rope_theta)
    # Without rope_scaling, positions are not scaled, and neither are scores.
    assert (config.rotary_scaling_factor, config.mscale_all_dim) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_nextn_predict_layers": 1}, "Set num_nextn_predict_layers to 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "Remove quantization_config and use bf16 weights"),
        ({"q_lora_rank": None}, "only DeepSeek models with q_lora_rank"),
        ({"tie_word_embeddings": True}, "needs moe_layer_freq=1 and tie_word_embeddings=False"),
        ({"scoring_func": "softmax"}, "support only scoring_func=sigmoid"),
        ({"attention_dropout": 0.1}, "supports attention dropout"),
    ],
)
def test_unsupported_checkpoint_rejected_by_the_builder(changes, sentence):
    from post_training.models.deepseek_v3 import FAMILY

    hf_config = DeepseekV3Config.from_dict(TINY_MODELS["deepseek_v3"] | changes)
    with pytest.raises(ValueError, match=sentence) as caught:
        FAMILY.megatron.config(hf_config, float)
    assert [str(caught.value)] == list(variant_findings(FAMILY, hf_config.to_dict()))[:1]
