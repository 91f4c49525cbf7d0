"""A small random DeepSeek-V3 checkpoint in which every weight matters, and transformers' reference results on it."""

from pathlib import Path

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

LAYERS = 3
VOCABULARY = 64


def configuration() -> DeepseekV3Config:
    """Return DeepSeek-V3's routing (256 experts, 4 of 8 groups, 8 experts a token) and YaRN, at small widths."""
    return DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=2,
        n_routed_experts=256,
        routed_scaling_factor=2.5,
        kv_lora_rank=24,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=8,
        n_group=8,
        topk_group=4,
        num_experts_per_tok=8,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling={
            "type": "yarn",
            "factor": 8,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
        num_nextn_predict_layers=0,
        tie_word_embeddings=False,
        initializer_range=0.12,
    )


def build_model(seed: int = 0) -> DeepseekV3ForCausalLM:
    """Build the model in fp32, with norm weights away from 1 and expert biases near 5, as DeepSeek's published ones."""
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM._from_config(configuration(), attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(4.8, 5.2)
    return model


def make_batch(seed: int = 1) -> dict[str, torch.Tensor]:
    """Make four left-padded sequences as verl does, and a random coefficient for every logit of a valid token."""
    generator = torch.Generator().manual_seed(seed)
    length, valid = 20, [20, 13, 7, 16]
    mask = torch.zeros(len(valid), length, dtype=torch.bool)
    for row, tokens in enumerate(valid):
        mask[row, length - tokens :] = True
    coefficients = torch.randn(len(valid), length, VOCABULARY, generator=generator) / 10
    return {
        "input_ids": torch.randint(1, VOCABULARY, mask.shape, generator=generator) * mask,
        "attention_mask": mask,
        "position_ids": (mask.long().cumsum(dim=1) - 1).clamp(min=0),
        "coefficients": coefficients * mask.unsqueeze(-1),
    }


def write_checkpoint_and_reference(folder: Path) -> None:
    """Write ``checkpoint/`` and ``reference.pt``: batch, logits and gradients of sum(logits * coefficients)."""
    model = build_model()
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
