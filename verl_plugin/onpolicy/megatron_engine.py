"""The update's own log-probs in verl's engine for Megatron-core, with MindSpeed or without."""

from __future__ import annotations

from typing import Any

import torch
from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy

from verl_plugin.onpolicy.update import OWN_ENTROPY, OnPolicyUpdate


class OnPolicyMegatron(OnPolicyUpdate):
    """verl's engine; an update computes its entropy without gradient, in chunks of tokens."""

    engine_config: Any

    def _lm_head_logits_processor(
        self, logits: torch.Tensor, label: torch.Tensor, temperature: torch.Tensor, **options: Any
    ) -> dict[str, torch.Tensor]:
        """As upstream, with the entropy beside the log-probs. logits: [samples, tokens, vocabulary of this rank]."""
        own = self._entropy(logits, temperature) if self._takes_own else {}
        # Upstream changes the logits in place.
        return super()._lm_head_logits_processor(logits, label, temperature, **options) | own  # type: ignore[misc]  # of the engine

    @torch.no_grad()
    def _entropy(self, logits: torch.Tensor, temperature: torch.Tensor) -> dict[str, torch.Tensor]:
        size = self.engine_config.entropy_from_logits_chunk_size
        parts = zip(logits.split(size, dim=1), temperature.split(size, dim=1), strict=True)
        scaled = (part / heat.clamp(min=1e-8).unsqueeze(-1).to(part.dtype) for part, heat in parts)
        return {OWN_ENTROPY: torch.cat([vocab_parallel_entropy(part) for part in scaled], dim=1)}
