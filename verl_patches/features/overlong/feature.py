"""The feature overlong: upstream's keys for the penalty, one for the filter, and what cannot go with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlay import ConfigurationError, Feature

PENALTY, FILTER = "reward_model.overlong_buffer", "algorithm.overlong_filtering"


@dataclass(frozen=True)
class OverlongBuffer:
    """`reward_model.overlong_buffer`: the last `length` of `longest` tokens cost up to `factor`.

    log: the penalty is one of the reward's further values, overlong_reward.
    """

    length: int
    longest: int
    factor: float
    log: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> OverlongBuffer | None:
        """Read verl's composed configuration; None where there is no penalty."""
        node = config["reward_model"].get("overlong_buffer")
        if node is None or node.get("enable") is not True:
            return None
        longest = config["data"]["max_response_length"]
        return cls(node.get("len", 0), longest, node.get("penalty_factor", 0.0), node.get("log") is True)


def filters_truncated(config: Mapping[str, Any]) -> bool:
    """Whether answers that were cut are left out of the loss."""
    return config["algorithm"].get("overlong_filtering") is True


def check_penalty(config: Mapping[str, Any], settings: Any) -> None:
    """The penalty begins within an answer, and the driver computes the rewards that it is taken from."""
    buffer = OverlongBuffer.of(config)
    if config["reward_model"]["reward_manager"] == "dapo":
        raise ConfigurationError(
            "reward_model.reward_manager=dapo is the naive one with a penalty whose settings verl's main_ppo does not "
            f"give it; choose naive, which {PENALTY}.enable=True gives the same penalty"
        )
    if buffer is None:
        return
    if not 1 <= buffer.length <= buffer.longest:
        raise ConfigurationError(
            f"{PENALTY}.len={buffer.length} is no part of the {buffer.longest} tokens of an answer "
            f"(data.max_response_length); give 1 to {buffer.longest}"
        )
    if config["reward_model"]["launch_reward_fn_async"]:
        raise ConfigurationError(
            f"{PENALTY}.enable=True is taken from rewards on the driver, and reward_model.launch_reward_fn_async=True "
            "computes them elsewhere; set it to False"
        )


def check_filter(config: Mapping[str, Any], settings: Any) -> None:
    """An answer without a token that counts has no mean over its tokens."""
    mode = config["actor_rollout_ref"]["actor"]["loss_agg_mode"]
    if filters_truncated(config) and mode == "seq-mean-token-mean":
        raise ConfigurationError(
            f"{FILTER}=True leaves answers without tokens, whose mean actor_rollout_ref.actor.loss_agg_mode={mode} "
            "takes; choose token-mean, which is DAPO's"
        )


OVERLONG = Feature(
    name="overlong",
    purpose="Answers near the greatest length are penalised, and those that were cut can be left out of the loss.",
    switch=f"{PENALTY}.enable",
    checks=(check_penalty, check_filter),
)
