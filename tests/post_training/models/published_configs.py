"""Relevant keys of published models' config.json, by the NAME in https://huggingface.co/NAME/blob/main/config.json.

Keys that neither a check nor a model builder reads (token ids, initializer_range, auto_map, versions) are left out.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_COMMON: Config = {"hidden_act": "silu", "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}


def _dense(
    architecture: str, model_type: str, sizes: tuple[int, int, int, int, int], vocabulary: int, **more: Any
) -> Config:
    """Make a dense model's config. `sizes`: hidden, intermediate, layers, attention heads, key-value heads."""
    hidden, intermediate, layers, heads, groups = sizes
    return _COMMON | {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "rope_scaling": None,
        **more,
    }


def _qwen2(sizes: tuple[int, int, int, int, int], tied: bool, context: int = 32768, **more: Any) -> Config:
    window = {"use_sliding_window": False, "sliding_window": context, "max_window_layers": sizes[2]}
    vocabulary = 151936 if sizes[0] < 3584 else 152064
    of_qwen = {"tie_word_embeddings": tied, "max_position_embeddings": context, "rope_theta": 1000000.0, **window}
    return _dense("Qwen2ForCausalLM", "qwen2", sizes, vocabulary, **{**of_qwen, **more})


def _qwen3(sizes: tuple[int, int, int, int, int], tied: bool = False, **more: Any) -> Config:
    of_qwen: Config = {
        "tie_word_embeddings": tied, "max_position_embeddings": 40960, "rope_theta": 1000000, "head_dim": 128,
        "attention_bias": False, "use_sliding_window": False, "sliding_window": None, "max_window_layers": sizes[2],
    }  # fmt: skip
    return _dense("Qwen3ForCausalLM", "qwen3", sizes, 151936, **{**of_qwen, **more})


def _qwen3_moe(sizes: tuple[int, int, int, int, int], width: int, **more: Any) -> Config:
    experts: Config = {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": width, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
    }  # fmt: skip
    return _qwen3(sizes) | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | experts | more


_YARN_OF_DEEPSEEK: Config = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_FP8: Config = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
_DEEPSEEK_V3: Config = _dense(
    "DeepseekV3ForCausalLM", "deepseek_v3", (7168, 18432, 61, 128, 128), 129280,
    max_position_embeddings=163840, rope_theta=10000, rope_scaling=_YARN_OF_DEEPSEEK, tie_word_embeddings=False,
    attention_bias=False, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
    first_k_dense_replace=3, moe_layer_freq=1, n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5,
    scoring_func="sigmoid", topk_method="noaux_tc", q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, num_nextn_predict_layers=1, quantization_config=_FP8,
)  # fmt: skip
_DEEPSEEK_V2_LITE: Config = _DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
    "norm_topk_prob": False, "routed_scaling_factor": 1.0, "q_lora_rank": None, "vocab_size": 102400,
    "rope_scaling": _YARN_OF_DEEPSEEK | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
for _absent in ("num_nextn_predict_layers", "quantization_config"):
    del _DEEPSEEK_V2_LITE[_absent]
_MOONLIGHT: Config = _DEEPSEEK_V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "intermediate_size": 11264,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.446,
    "vocab_size": 163840, "max_position_embeddings": 8192, "rope_theta": 50000.0, "rope_scaling": None,
}  # fmt: skip
_LLAMA3: Config = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def _llama(sizes: tuple[int, int, int, int, int], **more: Any) -> Config:
    of_llama: Config = {
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": _LLAMA3, "attention_bias": False,
        "tie_word_embeddings": False, "mlp_bias": False, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return _dense("LlamaForCausalLM", "llama", sizes, 128256, **{**of_llama, **more})


def _mistral(sizes: tuple[int, int, int, int, int], vocabulary: int, **more: Any) -> Config:
    of_mistral: Config = {"max_position_embeddings": 32768, "rope_theta": 1000000.0, "sliding_window": None}
    return _dense("MistralForCausalLM", "mistral", sizes, vocabulary, **{**of_mistral, **more})


def _qwen2_5_vl(sizes: tuple[int, int, int, int, int], tied: bool, vision_intermediate: int = 3420) -> Config:
    named: Config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    mrope: Config = {"type": "mrope", "mrope_section": [16, 24, 24]}
    tower: Config = {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": vision_intermediate,
        "num_heads": 16, "in_chans": 3, "out_hidden_size": sizes[0], "patch_size": 14, "spatial_merge_size": 2,
        "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    tokens: Config = {
        "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
        "image_token_id": 151655, "video_token_id": 151656,
    }  # fmt: skip
    flat = _qwen2(sizes, tied, 128000, rope_scaling=mrope, sliding_window=32768)
    return flat | named | tokens | {"vision_config": tower}


def nested(config: Config) -> Config:
    """Return a multi-modal config.json as newer transformers writes it, with the decoder's values in `text_config`."""
    outside = ("architectures", "model_type", "vision_config", "torch_dtype", "image_token_id", "video_token_id")
    text = {name: value for name, value in config.items() if name not in outside}
    scaling = {**text["rope_scaling"], "type": "default", "rope_type": "default"}
    top = {name: config[name] for name in outside if name in config}
    return top | {"text_config": {**text, "model_type": f"{config['model_type']}_text", "rope_scaling": scaling}}


PUBLISHED_CONFIGS: dict[str, Config] = {
    "deepseek-ai/DeepSeek-V2-Lite-Chat": _DEEPSEEK_V2_LITE,
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-R1": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-V3.1": _DEEPSEEK_V3 | {"quantization_config": _FP8 | {"scale_fmt": "ue8m0"}},
    "deepseek-ai/DeepSeek-V3.2-Exp": _DEEPSEEK_V3
    | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
    # Edited for BF16 as docs/cluster.md says; and with only one of the two edits.
    "deepseek-ai/DeepSeek-V3, edited": {
        name: value for name, value in _DEEPSEEK_V3.items() if name != "quantization_config"
    }
    | {"num_nextn_predict_layers": 0},
    "deepseek-ai/DeepSeek-V3, FP8 left": _DEEPSEEK_V3 | {"num_nextn_predict_layers": 0},
    "moonshotai/Moonlight-16B-A3B-Instruct": _MOONLIGHT,
    "moonshotai/Kimi-K2-Instruct": _DEEPSEEK_V3
    | {"model_type": "kimi_k2", "n_routed_experts": 384, "num_attention_heads": 64, "first_k_dense_replace": 1}
    | {"n_group": 1, "topk_group": 1, "vocab_size": 163840, "num_nextn_predict_layers": 0},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _qwen2((1536, 8960, 28, 12, 2), False, 131072, rope_theta=10000),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _qwen2((3584, 18944, 28, 28, 4), False, 131072, rope_theta=10000),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": _qwen2((5120, 13824, 48, 40, 8), False, 131072),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": _qwen2((5120, 27648, 64, 40, 8), False, 131072),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _llama((4096, 14336, 32, 32, 8)),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": _llama((8192, 28672, 80, 64, 8)),
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen2((896, 4864, 24, 14, 2), True),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen2((1536, 8960, 28, 12, 2), True),
    "Qwen/Qwen2.5-3B-Instruct": _qwen2((2048, 11008, 36, 16, 2), True),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2((3584, 18944, 28, 28, 4), False),
    "Qwen/Qwen2.5-14B-Instruct": _qwen2((5120, 13824, 48, 40, 8), False),
    "Qwen/Qwen2.5-32B": _qwen2((5120, 27648, 64, 40, 8), False, 131072),
    "Qwen/Qwen2.5-72B-Instruct": _qwen2((8192, 29568, 80, 64, 8), False),
    "Qwen/Qwen2.5-Math-1.5B": _qwen2((1536, 8960, 28, 12, 2), True, 4096, rope_theta=10000),
    "Qwen/Qwen2.5-Math-7B": _qwen2((3584, 18944, 28, 28, 4), False, 4096, rope_theta=10000),
    "Qwen/Qwen2.5-Coder-32B-Instruct": _qwen2((5120, 27648, 64, 40, 8), False),
    "Qwen/QwQ-32B": _qwen2((5120, 27648, 64, 40, 8), False, 40960),
    "Qwen/Qwen2.5-7B-Instruct-1M": _qwen2((3584, 18944, 28, 28, 4), False, 1010000, rope_theta=10000000.0)
    | {"dual_chunk_attention_config": {"chunk_size": 262144, "original_max_position_embeddings": 262144}},
    # As Qwen2.5's model card says to add it for long texts.
    "Qwen/Qwen2.5-7B-Instruct, yarn": _qwen2((3584, 18944, 28, 28, 4), False)
    | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "Qwen/Qwen2.5-7B-Instruct, sliding": _qwen2((3584, 18944, 28, 28, 4), False)
    | {"use_sliding_window": True, "max_window_layers": 21},
    "Qwen/Qwen2.5-7B-Instruct-AWQ": _qwen2((3584, 18944, 28, 28, 4), False)
    | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}},
    "Qwen/Qwen2.5-VL-3B-Instruct": _qwen2_5_vl((2048, 11008, 36, 16, 2), True),
    "Qwen/Qwen2.5-VL-7B-Instruct": _qwen2_5_vl((3584, 18944, 28, 28, 4), False),
    "Qwen/Qwen2.5-VL-32B-Instruct": _qwen2_5_vl((5120, 27648, 64, 40, 8), False, 3456),
    "Qwen/Qwen3-0.6B": _qwen3((1024, 3072, 28, 16, 8), True),
    "Qwen/Qwen3-1.7B": _qwen3((2048, 6144, 28, 16, 8), True),
    "Qwen/Qwen3-4B": _qwen3((2560, 9728, 36, 32, 8), True),
    "Qwen/Qwen3-8B": _qwen3((4096, 12288, 36, 32, 8)),
    "Qwen/Qwen3-8B-FP8": _qwen3((4096, 12288, 36, 32, 8), quantization_config=_FP8),
    "Qwen/Qwen3-14B": _qwen3((5120, 17408, 40, 40, 8)),
    "Qwen/Qwen3-32B": _qwen3((5120, 25600, 64, 64, 8)),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe((2048, 6144, 48, 32, 4), 768),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe((4096, 12288, 94, 64, 4), 1536),
    "meta-llama/Llama-3.1-8B-Instruct": _llama((4096, 14336, 32, 32, 8)),
    "meta-llama/Llama-3.2-1B-Instruct": _llama((2048, 8192, 16, 32, 8), head_dim=64, tie_word_embeddings=True)
    | {"rope_scaling": _LLAMA3 | {"factor": 32.0}},
    "mistralai/Mistral-7B-Instruct-v0.3": _mistral((4096, 14336, 32, 32, 8), 32768),
    "mistralai/Mistral-7B-v0.1": _mistral((4096, 14336, 32, 32, 8), 32000, sliding_window=4096),
    "mistralai/Mistral-Nemo-Instruct-2407": _mistral((5120, 14336, 40, 32, 8), 131072, head_dim=128),
    "THUDM/GLM-4-9B-0414": _dense(
        "Glm4ForCausalLM", "glm4", (4096, 13696, 40, 32, 2), 151552, max_position_embeddings=32768, head_dim=128
    ),
    "zai-org/GLM-4.5": _dense(
        "Glm4MoeForCausalLM", "glm4_moe", (5120, 12288, 92, 96, 8), 151552, max_position_embeddings=131072,
        head_dim=128, n_routed_experts=160, num_experts_per_tok=8, moe_intermediate_size=1536, n_shared_experts=1,
        first_k_dense_replace=3, num_nextn_predict_layers=1, use_qk_norm=True, attention_bias=True,
    ),
    "google/gemma-2-9b-it": _dense(
        "Gemma2ForCausalLM", "gemma2", (3584, 14336, 42, 16, 8), 256000, max_position_embeddings=8192, head_dim=256,
        hidden_act="gelu_pytorch_tanh", sliding_window=4096, attn_logit_softcapping=50.0,
    ),
    "google/gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    },
}  # fmt: skip
