"""Model FLOPs utilisation (MFU): the FLOPs that a model needs, as a share of a die's peak.

Recomputed FLOPs do not count, so recomputation lowers the utilisation (PaLM, arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from post_training.models.families import decoder_values, find_family
from post_training.report.rates import StepStatistics

DIES_OF_A_CARD = 2
FORWARD_AND_BACKWARD = 3  # a backward pass is two forward passes


@dataclass(frozen=True)
class Peak:
    """Dense BF16 TFLOPS of one die, with their source."""

    teraflops: float
    source: str


# No public data sheet states it for a die, and sources differ; MFU is inversely proportional to the peak.
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
    """Return the FLOPs of one forward pass over a sequence of `tokens` tokens with causal attention.

    A token needs two FLOPs for each weight with which it is multiplied: of the experts only the chosen ones count, and
    embeddings are looked up. Attention needs two for each pair of tokens and each element of a head's query and value.

    Args:
        model: a HuggingFace config.json of a known family.
        tokens: length of the sequence.

    Raises:
        UnknownModelError: the model's family is unknown, or a field is missing.
    """
    family = find_family(model)
    if family is None:
        raise UnknownModelError(f"no formula for models of type {model.get('model_type')!r}")
    try:
        sizes = family.sizes(decoder_values(model))
    except (KeyError, TypeError) as error:
        raise UnknownModelError(f"the model's config.json lacks {error}") from error
    # Causal: half of all pairs, and each counts twice, as a multiplication and an addition.
    return 2 * sizes.weights_met * tokens + sizes.layers * sizes.score_width * tokens * tokens


def utilisation(model: Mapping[str, Any], statistics: StepStatistics, dies: int, peak: float) -> float | None:
    """Return the MFU of a step's update between 0 and 1; None if its seconds are not known.

    Every sequence counts as one of mean length, which ignores the attention that the spread of lengths adds.

    Args:
        model: a HuggingFace config.json of a known family.
        statistics: of the step.
        dies: number of dies.
        peak: TFLOPS of one die.

    Raises:
        UnknownModelError: there is no formula for the model.
    """
    seconds, tokens = statistics.seconds.get("update"), statistics.prompt_tokens + statistics.response_tokens
    if not seconds:
        return None
    work = FORWARD_AND_BACKWARD * statistics.sequences * forward_flops(model, tokens)
    return work / seconds / (dies * peak * 1e12)
