"""The arithmetic of the recipe's table: from seconds and lengths to tokens a second.

    rollout  = tokens of the responses / seconds of the rollout / cards
    training = tokens of prompts and responses / seconds of the update / cards
    system   = tokens of prompts and responses / seconds of the step / cards
    trained  = the same with the seconds of the step without saving and validation

For example the published row with true weights: 512 x 16 sequences of 77.8 + 1576.6 tokens in 859.68 s on 128 cards are
13,552,845 / 859.68 / 128 = 123.16 tokens a second and card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# In the order of the recipe's table. `rest` is what no other column holds: offload, loading and verl's own work.
COLUMNS = ("rollout", "old_log_prob", "ref", "reward", "adv", "update", "reshard", "rest")


@dataclass(frozen=True)
class StepStatistics:
    """A step, or the mean of several. Tokens are means a sequence, seconds go by COLUMNS; None is not measured.

    truncated: share of the responses that were cut at their greatest length. aside: seconds of the total that went into
    saving and validation.
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
        """Of prompts and responses of the whole step."""
        return self.sequences * (self.prompt_tokens + self.response_tokens)


@dataclass(frozen=True)
class Rates:
    """Tokens a second of one card or one die; None where the seconds were not measured or are 0.

    system: of whole steps. trained: of steps without their saving and validation.
    """

    rollout: float | None
    training: float | None
    system: float | None
    trained: float | None = None

    def over(self, parts: float) -> Rates:
        """Of one of so many equal parts."""
        found = (self.rollout, self.training, self.system, self.trained)
        return Rates(*(None if rate is None else rate / parts for rate in found))


def rates(statistics: StepStatistics, units: float) -> Rates:
    """Tokens a second of each of `units` cards or dies; the only die of a run is half a card."""
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
