"""Model FLOPs utilisation: the multiplications and additions that a model needs, against what a die could do.

What is recomputed is not counted, so that recomputation lowers the figure (PaLM, arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from post_training.report.rates import StepFigures

DIES_OF_A_CARD = 2
FORWARD_AND_BACKWARD = 3  # a backward pass is two forward passes


@dataclass(frozen=True)
class Peak:
    """Dense BF16 TFLOPS of one die, and who says so."""

    teraflops: float
    source: str


# No public data sheet says it for a die, and sources differ; MFU by another peak is in inverse proportion.
A3_PEAKS = (
    Peak(
        376,
        "752 a card, as profile ATLAS_800_A3_752T_128G_DIE of the vendor's msmodeling has it; others say 700 to 800",
    ),
    Peak(280, "560 a card, as its profile ATLAS_800_A3_560T_128G_DIE has it for the smaller A3"),
    Peak(354, "708 a card, as verl has it since its pull request 3053"),
)
PEAK = A3_PEAKS[0]


class UnknownModelError(ValueError):
    """There is no formula for this model; the message is one sentence."""


def forward_flops(model: Mapping[str, Any], tokens: float) -> float:
    """FLOPs of one forward pass over a sequence of `tokens` tokens, whose attention is causal.

    Two for each weight that a token meets (embeddings are looked up, not multiplied; of the experts those that it goes
    to), and in attention for each pair of tokens two for each width of a head's query and value.

    Args:
        model: a HuggingFace config.json of deepseek_v3, qwen2 or llama.

    Raises:
        UnknownModelError: another model, or a field is missing.
    """
    kind = model.get("model_type")
    if kind not in ("deepseek_v3", "qwen2", "llama"):
        raise UnknownModelError(f"there is no formula for models of type {kind!r}")
    try:
        latent = kind == "deepseek_v3"
        weights, width = _latent_attention(model) if latent else _grouped_attention(model)
        layers, hidden = model["num_hidden_layers"], model["hidden_size"]
        dense = model["first_k_dense_replace"] if latent else layers
        feed_forward = dense * 3 * hidden * model["intermediate_size"]
        if latent:
            feed_forward += (layers - dense) * _expert_weights(model)
        met = layers * weights + feed_forward + hidden * model["vocab_size"]
    except (KeyError, TypeError) as error:
        raise UnknownModelError(f"the model's config.json lacks {error}") from error
    # Causal: half of all pairs, and each counts twice, as a multiplication and an addition.
    attention = layers * model["num_attention_heads"] * width * tokens * tokens
    return 2 * met * tokens + attention


def _latent_attention(model: Mapping[str, Any]) -> tuple[int, int]:
    """Weights of a layer's MLA, and the widths of a head's query and value together."""
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    nope, rope, value = model["qk_nope_head_dim"], model["qk_rope_head_dim"], model["v_head_dim"]
    latent, query = model["kv_lora_rank"], model.get("q_lora_rank")
    queries = hidden * query + query * heads * (nope + rope) if query else hidden * heads * (nope + rope)
    keys_and_values = hidden * (latent + rope) + latent * heads * (nope + value)
    return queries + keys_and_values + heads * value * hidden, nope + rope + value


def _grouped_attention(model: Mapping[str, Any]) -> tuple[int, int]:
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    width = model.get("head_dim") or hidden // heads
    return hidden * width * (2 * heads + 2 * model["num_key_value_heads"]), 2 * width


def _expert_weights(model: Mapping[str, Any]) -> int:
    """Of a layer: the router, and the experts that a token goes to, shared ones included."""
    experts = model["num_experts_per_tok"] + (model.get("n_shared_experts") or 0)
    return model["hidden_size"] * (model["n_routed_experts"] + 3 * model["moe_intermediate_size"] * experts)


def utilisation(model: Mapping[str, Any], figures: StepFigures, dies: int, peak: float) -> float | None:
    """MFU of a step's update between 0 and 1; None where its seconds are not known.

    Every sequence counts as one of mean length, which leaves out what the spread of lengths adds to attention.

    Args:
        peak: TFLOPS of one die.

    Raises:
        UnknownModelError: there is no formula for the model.
    """
    seconds, tokens = figures.seconds.get("update"), figures.prompt_tokens + figures.response_tokens
    if not seconds:
        return None
    work = FORWARD_AND_BACKWARD * figures.sequences * forward_flops(model, tokens)
    return work / seconds / (dies * peak * 1e12)
