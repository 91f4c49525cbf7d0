"""The features for long answers: upstream's keys for the penalty, a key for the filter, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlay import ConfigurationError, Feature, Key

PENALTY, FILTER = "reward_model.overlong_buffer", "algorithm.overlong_filtering"


@dataclass(frozen=True)
class OverlongBuffer:
    """`reward_model.overlong_buffer`: the last `length` of `longest` tokens cost up to `factor`.

    With `log`, the penalty is reported as overlong_reward among the reward's further values.
    """

    length: int
    longest: int
    factor: float
    log: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> OverlongBuffer:
        """Read verl's composed configuration."""
        node, longest = config["reward_model"]["overlong_buffer"], config["data"]["max_response_length"]
        return cls(node.get("len", 0), longest, node.get("penalty_factor", 0.0), node.get("log") is True)


def check_penalty(config: Mapping[str, Any], settings: Any) -> None:
    """Check that the penalty begins within an answer, and that the driver computes the rewards that it changes."""
    buffer = OverlongBuffer.of(config)
    if not 1 <= buffer.length <= buffer.longest:
        raise ConfigurationError(
            f"{PENALTY}.len={buffer.length} is invalid: an answer has {buffer.longest} tokens "
            f"(data.max_response_length). Set it to 1 to {buffer.longest}"
        )
    if config["reward_model"]["launch_reward_fn_async"]:
        raise ConfigurationError(
            f"{PENALTY}.enable=True subtracts from rewards on the driver, but reward_model.launch_reward_fn_async=True "
            "computes them elsewhere. Set it to False"
        )


def check_filter(config: Mapping[str, Any], settings: Any) -> None:
    """Reject losses that take a mean over each answer's tokens: a filtered answer has none that counts."""
    modes = {"actor_rollout_ref.actor": config["actor_rollout_ref"]["actor"]["loss_agg_mode"]}
    if config["algorithm"]["adv_estimator"] == "gae":
        modes["critic"] = config["critic"]["loss_agg_mode"]
    for model, mode in modes.items():
        if mode == "seq-mean-token-mean":
            raise ConfigurationError(
                f"{FILTER}=True leaves answers without tokens, of which {model}.loss_agg_mode={mode} takes the mean. "
                "Set it to token-mean, as in DAPO"
            )


OVERLONG_PENALTY = Feature(
    name="overlong_penalty",
    purpose="Answers near the maximum length are penalised.",
    keys=(Key("overlong_penalty", f"{PENALTY}.enable", bool, False),),
    switch=f"{PENALTY}.enable",
    is_on=lambda settings: settings.overlong_penalty,
    checks=(check_penalty,),
)

OVERLONG_FILTERING = Feature(
    name="overlong_filtering",
    purpose="Truncated answers are excluded from the loss.",
    keys=(Key("overlong_filtering", FILTER, bool, False),),
    switch=FILTER,
    is_on=lambda settings: settings.overlong_filtering,
    checks=(check_filter,),
)
