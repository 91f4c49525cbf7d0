"""The feature chunked_log_probs: its configuration and its switch."""

from __future__ import annotations

from dataclasses import dataclass, field

from overlay import Feature


@dataclass(frozen=True)
class ChunkedLogProbsSettings:
    """Compute Megatron's log-probs and entropy from hidden states, one chunk of the vocabulary at a time.

    Whole logits never exist: a chunk's float32 logits take at most chunk_bytes, unless 128 columns take more. The
    backward computes them again. Values and gradients are upstream's. Without it, all logits of a micro batch exist in
    float32 and in the model's type.
    """

    enabled: bool = True
    chunk_bytes: int = field(default=32 * 1024 * 1024, metadata={"at_least": 1})


CHUNKED_LOG_PROBS = Feature(
    name="chunked_log_probs",
    purpose="Log-probs and entropy of Megatron's training need the logits of one chunk of the vocabulary at a time.",
    section="actor_rollout_ref.overlay.chunked_log_probs",
    settings=ChunkedLogProbsSettings,
)
