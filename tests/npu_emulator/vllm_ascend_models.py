"""Tiny random checkpoints of the models with which vLLM-Ascend is tested."""

from pathlib import Path

from tests.vllm_cases import write_random_model


def deepseek(groups: int, experts: int, heads: int = 4):
    """Make a DeepSeek-V3 that vllm-ascend routes with npu_moe_gating_top_k (256 experts) or in torch (others)."""
    from transformers import DeepseekV3Config

    scaling = {
        "type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    return DeepseekV3Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=heads, n_shared_experts=1, n_routed_experts=experts,
        routed_scaling_factor=2.5, kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=16, n_group=groups, topk_group=max(groups // 2, 1), num_experts_per_tok=4, first_k_dense_replace=1,
        max_position_embeddings=256, rope_scaling=scaling, eos_token_id=2, bos_token_id=1, initializer_range=0.1,
        moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True, rms_norm_eps=1e-6,
    )  # fmt: skip


def qwen2(key_heads: int, tied: bool):
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=key_heads, max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.1,
    )  # fmt: skip


def qwen3(experts: int = 0):
    """Make a Qwen3, dense or with experts in each layer.

    As in published models, a head is wider than its share of the hidden size.
    """
    from transformers import Qwen3Config, Qwen3MoeConfig

    sizes = dict(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.1,
    )  # fmt: skip
    if not experts:
        return Qwen3Config(**sizes)
    return Qwen3MoeConfig(
        num_experts=experts, num_experts_per_tok=4, moe_intermediate_size=32, norm_topk_prob=True, **sizes
    )


MODELS = {
    "deepseek256": lambda: deepseek(8, 256),
    "deepseek8": lambda: deepseek(1, 8),
    "deepseek16heads": lambda: deepseek(1, 32, heads=16),
    "qwen2": lambda: qwen2(4, tied=False),
    "qwen2.5": lambda: qwen2(2, tied=False),
    "qwen2.5tied": lambda: qwen2(2, tied=True),
    "qwen3": qwen3,
    "qwen3moe": lambda: qwen3(experts=16),
}


def write_checkpoint(name: str, folder: Path) -> None:
    write_random_model(MODELS[name](), folder)
