"""Small random checkpoints of the families other than DeepSeek-V3, FP8 or BF16."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.configuration_utils import PretrainedConfig

from post_training.checkpoint.fp8 import BLOCK
from post_training.models.families import table_for
from tests.post_training.checkpoint.synthetic import quantised

SIZES = dict(
    vocab_size=96, hidden_size=160, intermediate_size=200, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True, **SIZES),
    "qwen3": Qwen3Config(architectures=["Qwen3ForCausalLM"], head_dim=48, **SIZES),
    "qwen3_moe": Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"], head_dim=48, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=136, **SIZES,
    ),
}  # fmt: skip


def write(name: str, folder: Path, fp8: bool = False, seed: int = 0) -> Path:
    """Write a random checkpoint in one file, with linear weights in FP8 or all in bfloat16, and return its folder."""
    folder.mkdir(parents=True)
    config, generator, tensors = CONFIGS[name].to_dict(), torch.Generator().manual_seed(seed), {}
    for weight, dims in table_for(config).shapes.items():
        if fp8 and weight.endswith("_proj.weight"):
            tensors[weight], tensors[f"{weight}_scale_inv"] = quantised(dims, generator, 0.05)
        else:
            tensors[weight] = torch.randn(dims, generator=generator).to(torch.bfloat16)
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
