"""A small random Qwen2 checkpoint with grouped queries, and transformers' results on it."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.post_training.models.megatron.deepseek_v3_checkpoint import VOCABULARY, make_batch


def write_dense_checkpoint_and_reference(folder: Path) -> None:
    """Write ``dense_checkpoint/`` and ``dense_reference.pt``: logits, and gradients of the first and last weights."""
    torch.manual_seed(5)
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = Qwen2ForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.data.uniform_(-0.5, 0.5)
    model.save_pretrained(folder / "dense_checkpoint")
    batch = make_batch()
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long(), position_ids=batch["position_ids"]
    ).logits
    (logits * batch["coefficients"]).sum().backward()
    gradients = {
        "embedding.word_embeddings.weight": model.model.embed_tokens.weight.grad,
        "decoder.final_layernorm.weight": model.model.norm.weight.grad,
    }
    torch.save({"batch": batch, "logits": logits.detach(), "gradients": gradients}, folder / "dense_reference.pt")
