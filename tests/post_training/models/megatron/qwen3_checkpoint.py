"""Small random Qwen3 and Qwen3-MoE checkpoints in which every weight matters, and transformers' results on them."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.post_training.models.megatron.deepseek_v3_checkpoint import VOCABULARY, make_batch

LAYERS = 4
# Heads are wider than their share of the hidden size, as in the published models.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "initializer_range": 0.2,
}  # fmt: skip


def build_model(name: str) -> PreTrainedModel:
    """Build `qwen3` or `qwen3_moe` in fp32, with norm weights away from 1."""
    torch.manual_seed(5)
    if name == "qwen3":
        made = Qwen3ForCausalLM, Qwen3Config(architectures=["Qwen3ForCausalLM"], **SIZES)
    else:
        config = Qwen3MoeConfig(
            architectures=["Qwen3MoeForCausalLM"],
            num_experts=16,
            num_experts_per_tok=4,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            **SIZES,
        )
        made = Qwen3MoeForCausalLM, config
    model = made[0]._from_config(made[1], attn_implementation="eager").float().eval()
    for parameter, value in model.named_parameters():
        if parameter.endswith("norm.weight"):
            value.data.uniform_(0.5, 1.5)
    return model


def write_checkpoint_and_reference(name: str, folder: Path) -> set[str]:
    """Write ``checkpoint/`` and ``reference.pt``: batch, logits and gradients of sum(logits * coefficients).

    Returns:
        The names of the weights.
    """
    model = build_model(name)
    model.save_pretrained(folder / "checkpoint")
    batch = make_batch()
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long(), position_ids=batch["position_ids"]
    ).logits
    (logits * batch["coefficients"]).sum().backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    torch.save({"batch": batch, "logits": logits.detach(), "gradients": gradients}, folder / "reference.pt")
    return set(gradients)
