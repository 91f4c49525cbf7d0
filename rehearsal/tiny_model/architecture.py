"""The shapes of the tiny models: each family with every structural part of its full model and small widths.

Nothing here imports transformers, so that a driver can check a configuration before a model is made.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCABULARY_SIZE = 512
DEFAULT_MODEL_TYPE = "deepseek_v3"

_ALL = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "initializer_range": 0.03,
}

_GROUPED_QUERY = {
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}

# Values of config.json by its model_type, which is also the name of the family's module. Every width that tensor
# parallelism of two splits stays a multiple of 16.
TINY_MODELS: dict[str, dict[str, Any]] = {
    # 256 routed experts in 8 groups (with fewer experts vllm-ascend 0.9.1 scores the groups by another rule than
    # DeepSeek-V3), a first dense layer, a shared expert, MLA with low-rank queries and YaRN.
    "deepseek_v3": _ALL
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "moe_intermediate_size": 32,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
    },
    # Two key-value heads, as in Qwen2.5-0.5B and 1.5B. The published models share one matrix for embedding and output;
    # here, GRPO would then unlearn the tables of such a small model faster than it learns the signs.
    "qwen2": _ALL | _GROUPED_QUERY | {"architectures": ["Qwen2ForCausalLM"]},
    # Heads of query and key are normed, and together wider than the hidden size, as in the published models.
    "qwen3": _ALL
    | _GROUPED_QUERY
    | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4, "head_dim": 64, "attention_bias": False},
    # The same, with 128 experts in every layer, of which a token has 8.
    "qwen3_moe": _ALL
    | _GROUPED_QUERY
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 64,
        "attention_bias": False,
        "moe_intermediate_size": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    # A decoder like qwen2's, whose positions have three parts, and a vision tower of two layers: in the first a patch
    # attends to its window, in the second to the whole image. The rehearsal's images have four windows of one vision
    # token each. Heads of the vision tower are 80 wide, as in the published models.
    "qwen2_5_vl": _ALL
    | _GROUPED_QUERY
    | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "attention_dropout": 0.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "vision_start_token_id": 5,
        "vision_end_token_id": 6,
        "image_token_id": 7,
        "video_token_id": 8,
        "vision_config": {
            "depth": 2,
            "hidden_size": 160,
            "intermediate_size": 256,
            "num_heads": 2,
            "out_hidden_size": 128,
            "hidden_act": "silu",
            "in_channels": 3,
            "patch_size": 14,
            "spatial_patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 28,
            "fullatt_block_indexes": [1],
        },
    },
}


def reads_images(model_type: str) -> bool:
    """Whether the prompts of a family may hold images."""
    return "vision_config" in TINY_MODELS[model_type]


def tiny_config(
    pad_token_id: int, bos_token_id: int, eos_token_id: int, model_type: str = DEFAULT_MODEL_TYPE, **changes: int
) -> PretrainedConfig:
    """Return the configuration of the tiny model of a family.

    Args:
        pad_token_id, bos_token_id, eos_token_id: ids of the tokenizer's special tokens.
        model_type: a key of `TINY_MODELS`; KeyError for another one.
        changes: other values for keys of the configuration.
    """
    from transformers import AutoConfig

    values = deepcopy(TINY_MODELS[model_type])  # transformers 5 writes into mappings that it is given
    tokens = {"pad_token_id": pad_token_id, "bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
    return AutoConfig.for_model(model_type, **(values | tokens | changes))
