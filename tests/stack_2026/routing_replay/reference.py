"""A reference that computes samples with given experts in plain transformers."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.stack_2026.vllm_ascend.models import write_checkpoint


@dataclasses.dataclass
class Reference:
    """Plain transformers in float32, computing samples whose tokens have given experts.

    A router's logits of all other experts are set to minus infinity, so that it chooses the given experts and weights
    them itself.
    """

    folder: Path

    def __post_init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        self.blocks = [(i, layer.mlp) for i, layer in enumerate(self.model.model.layers) if hasattr(layer.mlp, "gate")]

    def log_probs(self, tokens: torch.Tensor, experts: torch.Tensor | None) -> torch.Tensor:
        """Return the log-prob of every token but the first, given the ones before it."""
        handles = []
        for layer, block in self.blocks:
            if experts is not None:
                handles.append(block.gate.register_forward_hook(partial(self._masked, experts[:, layer].long())))
        logits = self.model(input_ids=tokens[None]).logits[0]
        for handle in handles:
            handle.remove()
        return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)

    def preferred(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the experts that the model itself chooses; those of the last token stay 0."""
        config, found = self.model.config, {}
        shape = (len(tokens), config.num_hidden_layers, config.num_experts_per_tok)
        chosen = torch.zeros(shape, dtype=torch.uint8)
        handles = [
            block.experts.register_forward_pre_hook(
                lambda module, inputs, layer=layer: found.update({layer: inputs[1]})
            )
            for layer, block in self.blocks
        ]
        with torch.no_grad():
            self.model(input_ids=tokens[None])
        for handle in handles:
            handle.remove()
        for layer, experts in found.items():
            chosen[:-1, layer] = experts[:-1].to(torch.uint8)
        return chosen

    @staticmethod
    def _masked(experts: torch.Tensor, gate: Any, inputs: Any, output: Any) -> Any:
        logits = output[0] if isinstance(output, tuple) else output
        mask = torch.full_like(logits, -torch.inf).scatter(1, experts, 0.0)
        mask[-1] = 0.0  # the rollout never ran the last token
        masked = logits + mask
        if not isinstance(output, tuple):
            return masked
        weights, chosen = masked.softmax(-1).topk(gate.top_k, dim=-1)
        return masked, weights / weights.sum(-1, keepdim=True), chosen


def write_models(folder: Path) -> None:
    """Write the checkpoints of all cases."""
    for model in ("qwen3moe", "deepseek"):
        write_checkpoint(model, folder / model)
