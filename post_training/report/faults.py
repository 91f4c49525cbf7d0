"""Finds faults that invalidate a run: skipped updates, values that are not finite, missing or failed comparisons.

The driver checks every step when it logs it. Summaries check again with the written metrics, in which None stands for a
value that was not finite.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from post_training.report.metrics import (
    EXPERT_SETS_DIFFER,
    EXPERT_TIES_DIFFER,
    LOGPROB_DIFFERENCE,
    LOGPROB_DIFFERENCE_MEAN,
    SKIPPED_UPDATES,
    UPDATE_SECONDS,
    WEIGHTS_EXACT,
)

# In float32 rollout and training compute the same function; only the order of sums differs.
FLOAT32_GATE = 1e-3
# If tied experts were chosen differently, single tokens may differ more, but the mean over all tokens does not.
FLOAT32_MEAN_GATE = 1e-4
REWARD_ERROR = "reward_error"
NOT_ANSWERING = "not_answering"
RAY_ENDED = "ray_ended"
INVALID = "the run is not valid"
REWARD_FAILED = "the reward function failed"
_SHOWN_STEPS = 4
_SHOWN_METRICS = 3


@dataclass
class RunFaults:
    """The faults of a run, by step; add every step once, in order.

    Args:
        precision: data type of the weights. In float32 log-probs of rollout and training differ by less than
            `FLOAT32_GATE`, and both choose the same experts; ties are excluded (`mismatch/router_ties.py`). In
            bfloat16 near ties may be decided either way.
    """

    precision: str
    skipped: dict[int, int] = field(default_factory=dict)
    nonfinite: dict[str, list[int]] = field(default_factory=dict)
    uncompared: list[int] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)
    beyond_gate: dict[int, float] = field(default_factory=dict)
    other_experts: dict[int, float] = field(default_factory=dict)
    reward_errors: dict[int, list[str]] = field(default_factory=dict)

    def add(self, step: int, metrics: Mapping[str, Any], reward_errors: Sequence[str] = ()) -> dict[str, str]:
        """Add a step's metrics and the errors of its rewards; return the clauses of this step only."""
        alone = RunFaults(self.precision)
        alone._take(step, metrics, reward_errors)
        self._take(step, metrics, reward_errors)
        return alone.clauses()

    def _take(self, step: int, metrics: Mapping[str, Any], reward_errors: Sequence[str]) -> None:
        if reward_errors:
            self.reward_errors.setdefault(step, []).extend(reward_errors)
        skipped = sum(metrics.get(name) or 0 for name in SKIPPED_UPDATES)
        if skipped:
            self.skipped[step] = int(skipped)
        for name, value in metrics.items():
            if not _is_finite(value):
                self.nonfinite.setdefault(name, []).append(step)
        if UPDATE_SECONDS not in metrics:  # a validation before the first step
            return
        difference = metrics.get(LOGPROB_DIFFERENCE)
        if LOGPROB_DIFFERENCE not in metrics:
            self.uncompared.append(step)
        elif self.precision == "float32" and difference is not None and _is_beyond_gate(difference, metrics):
            self.beyond_gate[step] = difference
        share = metrics.get(EXPERT_SETS_DIFFER)
        if self.precision == "float32" and share:
            self.other_experts[step] = share
        if WEIGHTS_EXACT in metrics and metrics[WEIGHTS_EXACT] != 1:
            self.differing.append(step)

    def state(self) -> dict[str, Any]:
        """Return all faults as JSON-ready values, for a resumed run."""
        return json.loads(json.dumps({name: value for name, value in asdict(self).items() if name != "precision"}))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the faults that `state` returned; step numbers become integers again."""
        for name, value in state.items():
            by_step = name in ("skipped", "beyond_gate", "other_experts", "reward_errors")
            setattr(self, name, {int(step): each for step, each in value.items()} if by_step else value)

    @property
    def reward_error_count(self) -> int:
        """Number of failures of the reward function."""
        return sum(map(len, self.reward_errors.values()))

    def clauses(self) -> dict[str, str]:
        """Return a clause for each kind of fault, likeliest cause first; empty if the run has none."""
        found = {}
        if self.reward_errors:
            first, times = next(iter(self.reward_errors.values()))[0], self.reward_error_count
            often = "once" if times == 1 else f"{times} times"
            found[REWARD_ERROR] = f"{REWARD_FAILED} {often} at {steps_in_words(self.reward_errors)} ({first})"
        if self.skipped:
            count = sum(self.skipped.values())
            updates = "1 update was" if count == 1 else f"{count} updates were"
            found["update_skipped"] = (
                f"{updates} skipped at {steps_in_words(self.skipped)}, because gradients contained inf or nan"
            )
        if self.differing:
            found["weights_differ"] = (
                f"rollout weights differed from training weights at {steps_in_words(self.differing)}"
            )
        if self.uncompared:
            found["not_compared"] = (
                f"no log-prob of rollout and training was compared at {steps_in_words(self.uncompared)}"
            )
        if self.beyond_gate:
            found["log_probs_differ"] = (
                f"log-probs of rollout and training differed by up to {max(self.beyond_gate.values()):.2e} at "
                f"{steps_in_words(self.beyond_gate)}; in float32 the limit is {FLOAT32_GATE:g}"
            )
        if self.other_experts:
            found["experts_differ"] = (
                f"rollout and training chose different experts for up to {max(self.other_experts.values()):.2%} of the "
                f"compared tokens and layers at {steps_in_words(self.other_experts)}; in float32 none is allowed"
            )
        if self.nonfinite:
            found["metric_not_finite"] = self._nonfinite_in_words()
        return found

    def _nonfinite_in_words(self) -> str:
        shown = [f"{name} at {steps_in_words(steps)}" for name, steps in list(self.nonfinite.items())[:_SHOWN_METRICS]]
        more = len(self.nonfinite) - len(shown)
        return "metrics were not finite: " + ", ".join(shown) + (f" and {more} more metrics" if more else "")

    def sentence(self) -> str | None:
        """Return all faults as one sentence; None if there are none."""
        found = self.clauses()
        return f"{INVALID}: {'; '.join(found.values())}" if found else None


def steps_in_words(steps: Sequence[int] | Mapping[int, Any]) -> str:
    """Format steps as `step 3`, `steps 1 and 2`, or the first few and the number of the others."""
    numbers = [str(step) for step in steps]
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if len(numbers) > _SHOWN_STEPS + 1:
        numbers = [*numbers[:_SHOWN_STEPS], f"{len(numbers) - _SHOWN_STEPS} more"]
    return f"steps {', '.join(numbers[:-1])} and {numbers[-1]}"


def _is_beyond_gate(difference: float, metrics: Mapping[str, Any]) -> bool:
    """Return whether the largest difference of a float32 step proves that rollout and training compute differently."""
    mean = metrics.get(LOGPROB_DIFFERENCE_MEAN)
    if metrics.get(EXPERT_TIES_DIFFER) and mean is not None and mean < FLOAT32_MEAN_GATE:
        return False
    return _is_finite(difference) and difference >= FLOAT32_GATE


def _is_finite(value: Any) -> bool:
    """Return whether a metric is finite; text counts as finite, because it is not checked here."""
    if getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))
