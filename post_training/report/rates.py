"""Computes tokens per second from seconds and lengths, as the recipe's table does.

    rollout  = tokens of the responses / seconds of the rollout / cards
    training = tokens of prompts and responses / seconds of the update / cards
    system   = tokens of prompts and responses / seconds of the step / cards
    trained  = the same with the seconds of the step without saving and validation

For example, in the published row with true weights 512 x 16 sequences of 77.8 + 1576.6 tokens in 859.68 s on 128 cards
are 13,552,845 / 859.68 / 128 = 123.16 tokens per second and card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# In the order of the recipe's table. `rest` is the time outside all other columns: offload, loading, verl's own work.
COLUMNS = ("rollout", "old_log_prob", "ref", "reward", "adv", "update", "reshard", "rest")


@dataclass(frozen=True)
class StepStatistics:
    """A step, or the mean of several steps; None was not measured.

    Attributes:
        prompt_tokens, response_tokens: means over sequences.
        truncated: share of the responses that were cut at the length limit.
        seconds: by the names in COLUMNS.
        total: seconds of the whole step.
        aside: seconds of the total for saving and validation.
    """

    sequences: int
    prompt_tokens: float
    response_tokens: float
    truncated: float | None
    seconds: Mapping[str, float | None]
    total: float
    aside: float | None = None

    @property
    def tokens(self) -> float:
        """Tokens of all prompts and responses of the step."""
        return self.sequences * (self.prompt_tokens + self.response_tokens)


@dataclass(frozen=True)
class Rates:
    """Tokens per second of one card or one die; None if the seconds were not measured or are 0.

    Attributes:
        system: of whole steps.
        trained: of steps without saving and validation.
    """

    rollout: float | None
    training: float | None
    system: float | None
    trained: float | None = None

    def over(self, parts: float) -> Rates:
        """Return the rates divided by `parts`, for example those of a die from those of a card."""
        found = (self.rollout, self.training, self.system, self.trained)
        return Rates(*(None if rate is None else rate / parts for rate in found))


def rates(statistics: StepStatistics, units: float) -> Rates:
    """Return the tokens per second of each of `units` cards or dies; a run on one die has half a card."""
    responses = statistics.sequences * statistics.response_tokens
    return Rates(
        rollout=_rate(responses, statistics.seconds.get("rollout"), units),
        training=_rate(statistics.tokens, statistics.seconds.get("update"), units),
        system=_rate(statistics.tokens, statistics.total, units),
        trained=None
        if statistics.aside is None
        else _rate(statistics.tokens, statistics.total - statistics.aside, units),
    )


def _rate(tokens: float, seconds: float | None, units: float) -> float | None:
    return tokens / seconds / units if seconds else None
