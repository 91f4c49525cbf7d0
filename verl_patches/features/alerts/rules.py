"""Rules over the metrics of a run: their conditions, and the step at which each is met."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from overlay import SettingsError

CONDITIONS = ("above", "below", "rises_by", "stays_within", "nan")
ACTIONS = ("log", "webhook", "save_and_stop")
# A rise is measured from the median of at least and at most so many steps before it.
_LEAST_EARLIER, _MOST_EARLIER = 5, 100
DEFAULTS: dict[str, dict[str, Any]] = {
    "skipped_update": {"metric": "actor/nonfinite_steps", "above": 0},
    "kl": {"metric": "actor/kl_loss", "above": 0.1, "for": 3},
    "entropy": {"metric": "actor/entropy_loss", "below": 0.01, "for": 5},
    "reward_flat": {"metric": "critic/score/mean", "stays_within": 0.001, "for": 20},
    "log_prob_gap": {"metric": "training/rollout_logprob_diff_mean", "above": 0.1, "for": 3},
    "truncated": {"metric": "response_length/clip_ratio", "above": 0.5, "for": 5},
    "slow_step": {"metric": "timing_s/step", "rises_by": 2.0, "for": 2},
}
"""The default rules by name; all of them only log."""


@dataclass(frozen=True)
class Rule:
    """A rule, met at the last of `steps` consecutive logged steps at which its condition holds.

    Attributes:
        name: its key in the configuration.
        metric: its metric's name in metrics.jsonl.
        condition: `above` and `below` the limit; `nan`, not a finite number; `rises_by`, more than limit times the
            median of the steps before; `stays_within`, the last `steps` values differ by at most the limit.
        limit: see `condition`; 0 for `nan`.
        steps: see above.
        then: one of ACTIONS.
    """

    name: str
    metric: str
    condition: str
    limit: float
    steps: int
    then: str

    def sentence(self, step: int, value: float) -> str:
        """Return the message for a rule that was met at `step` with `value`."""
        what = {
            "above": f"above {self.limit:g}",
            "below": f"below {self.limit:g}",
            "rises_by": f"more than {self.limit:g} times its median",
            "stays_within": f"within {self.limit:g}",
            "nan": "not a finite number",
        }[self.condition]
        return f"alert {self.name} at step {step}: {self.metric} is {value:g}, {what} for {self.steps} steps"


def read_rules(given: Mapping[str, Any], with_defaults: bool, key: str) -> list[Rule]:
    """Read the rules of a configuration; a given rule replaces the default of its name, and null removes it.

    Args:
        given: by name, {metric, one of CONDITIONS, for, then}.
        with_defaults: whether the default rules count too.
        key: the configuration key of the rules, for messages.

    Raises:
        SettingsError: a rule is invalid; the message is one sentence.
    """
    chosen = {**(DEFAULTS if with_defaults else {}), **given}
    return [_rule(name, rule, f"{key}.{name}") for name, rule in chosen.items() if rule is not None]


def _rule(name: str, given: Any, key: str) -> Rule:
    if not isinstance(given, Mapping):
        raise SettingsError(
            f"{key}={given!r} is invalid. Set it to a group such as {{metric: actor/kl_loss, above: 0.1, for: 3}}"
        )
    unknown = sorted(set(given) - {"metric", "for", "then", *CONDITIONS})
    if unknown:
        raise SettingsError(f"unknown key {key}.{unknown[0]}; allowed are metric, for, then, {', '.join(CONDITIONS)}")
    conditions = [name for name in CONDITIONS if given.get(name) is not None and given[name] is not False]
    if not isinstance(given.get("metric"), str) or len(conditions) != 1:
        raise SettingsError(f"{key} needs a metric, a name in metrics.jsonl, and one of {', '.join(CONDITIONS)}")
    condition, steps, then = conditions[0], given.get("for", 1), given.get("then", "log")
    limit = 0.0 if condition == "nan" else given[condition]
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit):
        raise SettingsError(f"{key}.{condition}={limit!r} is invalid. Set it to a number")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise SettingsError(f"{key}.for={steps!r} is invalid. Set it to a number of steps, at least 1")
    if condition == "stays_within" and steps < 2:
        raise SettingsError(f"{key}.for={steps} is invalid: a range needs at least 2 steps. Set it to 2 or more")
    if then not in ACTIONS:
        raise SettingsError(f"{key}.then={then!r} is invalid. Set it to one of {', '.join(ACTIONS)}")
    return Rule(name, given["metric"], condition, float(limit), steps, then)


class Watched:
    """A rule and its state. It is met at most once in a run.

    Attributes:
        rule: the rule.
        seen: whether any step had the metric.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule, self.seen = rule, False
        self._held, self._met = 0, False
        self._earlier: list[float] = []

    def step(self, value: float) -> bool:
        """Take in the metric of a step; return whether the rule is met now."""
        self.seen = True
        self._held = self._held + 1 if self._holds(value) else 0
        if math.isfinite(value):
            # Enough for the median of a rise, and the steps of the rise itself.
            self._earlier = [*self._earlier, value][-(_MOST_EARLIER + self.rule.steps) :]
        # `stays_within` already looks at a window of `steps` values.
        needed = 1 if self.rule.condition == "stays_within" else self.rule.steps
        met = self._held >= needed and not self._met
        self._met |= met
        return met

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"seen": self.seen, "held": self._held, "met": self._met, "earlier": self._earlier}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.seen, self._held, self._met = state["seen"], state["held"], state["met"]
        self._earlier = list(state["earlier"])

    def _holds(self, value: float) -> bool:
        rule = self.rule
        if rule.condition == "nan" or not math.isfinite(value):
            return rule.condition == "nan" and not math.isfinite(value)
        if rule.condition == "rises_by":
            # Steps that already meet the condition do not count in the median that they rose from.
            before = self._earlier[: len(self._earlier) - self._held][-_MOST_EARLIER:]
            return len(before) >= _LEAST_EARLIER and value > rule.limit * median(before)
        if rule.condition == "stays_within":
            window = [*self._earlier[-(rule.steps - 1) :], value]
            return len(window) == rule.steps and max(window) - min(window) <= rule.limit
        return value > rule.limit if rule.condition == "above" else value < rule.limit
