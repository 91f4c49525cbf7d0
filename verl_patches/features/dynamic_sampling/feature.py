"""The feature dynamic_sampling: the keys of upstream's recipe and a few more, and the settings that exclude it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from overlay import ConfigurationError, Feature, Key

KEY = "algorithm.filter_groups"
SEQUENCE_REWARD = "seq_reward"
Exhausted = Literal["fail", "stop_and_save"]


@dataclass(frozen=True)
class FilterGroups:
    """The filter of prompts for training, `algorithm.filter_groups`.

    Attributes:
        metric: a name in the reward function's output, or seq_reward, the sum of an answer's rewards.
        max_num_gen_batches: generation batches that a step may take; 0 or less means no limit.
        lower_bound, upper_bound: inclusive bounds of a group's mean of the metric.
        on_exhausted: what happens if a step cannot be filled.
    """

    metric: str
    max_num_gen_batches: int = 0
    lower_bound: float | None = None
    upper_bound: float | None = None
    on_exhausted: Exhausted = "fail"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> FilterGroups:
        """Read verl's composed configuration."""
        node = config["algorithm"]["filter_groups"]
        known = {name: node.get(name) for name in cls.__dataclass_fields__}
        return cls(**{name: value for name, value in known.items() if value is not None or name == "metric"})


def check_filter(config: Mapping[str, Any], settings: Any) -> None:
    """Check that the filter has a metric, bounds that a group can meet, and settings that it can run with."""
    chosen = FilterGroups.of(config)
    if not chosen.metric:
        raise ConfigurationError(
            f"{KEY}.metric=null is invalid. Set it to an output of the reward function beside the score, such as acc, "
            f"or to {SEQUENCE_REWARD}, the answer's reward"
        )
    lower, upper = chosen.lower_bound, chosen.upper_bound
    if lower is not None and upper is not None and lower > upper:
        raise ConfigurationError(
            f"{KEY}.lower_bound={lower} is above {KEY}.upper_bound={upper}, so no group qualifies. Exchange them"
        )
    _check_surroundings(config)


def _check_surroundings(config: Mapping[str, Any]) -> None:
    trainer, generated = config["trainer"], config["data"].get("gen_batch_size")
    if config["reward_model"]["launch_reward_fn_async"]:
        raise ConfigurationError(
            f"{KEY}.enable=True needs the rewards before a step begins, but reward_model.launch_reward_fn_async=True "
            "computes them after. Set it to False"
        )
    if trainer["total_training_steps"] is None:
        raise ConfigurationError(
            f"{KEY}.enable=True needs trainer.total_training_steps, because the number of steps in "
            f"trainer.total_epochs={trainer['total_epochs']} depends on how many prompts qualify. Set it to a number"
        )
    dies = trainer["n_gpus_per_node"] * trainer["nnodes"]
    if generated is not None and generated % dies:
        raise ConfigurationError(
            f"data.gen_batch_size={generated} (prompts of a generation batch) does not divide among {dies} dies for "
            f"generation. Set it to a multiple of {dies}"
        )


DYNAMIC_SAMPLING = Feature(
    name="dynamic_sampling",
    purpose="Every step trains on the configured number of prompts whose answers differ; others are replaced.",
    keys=(Key("filter_groups", f"{KEY}.enable", bool, False),),
    switch=f"{KEY}.enable",
    is_on=lambda settings: settings.filter_groups,
    checks=(check_filter,),
)
