"""The shape of the tiny model: DeepSeek-V3 with every structural part of the full model and small widths."""

from __future__ import annotations

from transformers import DeepseekV3Config

VOCABULARY_SIZE = 512


def tiny_config(pad_token_id: int, bos_token_id: int, eos_token_id: int) -> DeepseekV3Config:
    """Return the configuration of the tiny DeepSeek-V3.

    It keeps what decides which code runs: 256 routed experts in 8 groups (with fewer experts vllm-ascend 0.9.1 scores
    the groups by another rule than DeepSeek-V3), a first dense layer, a shared expert, MLA with low-rank queries and
    YaRN. Every width that tensor parallelism of two splits stays a multiple of 16.

    Args:
        pad_token_id, bos_token_id, eos_token_id: ids of the tokenizer's special tokens.
    """
    return DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        rope_scaling={
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        rms_norm_eps=1e-6,
        hidden_act="silu",
        attention_bias=False,
        initializer_range=0.03,
        tie_word_embeddings=False,
        num_nextn_predict_layers=0,
        pad_token_id=pad_token_id,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
    )
