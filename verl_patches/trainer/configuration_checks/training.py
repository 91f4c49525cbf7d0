"""Rejects settings that training would ignore or apply wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlay import ConfigurationError


def check_group_size(config: Mapping[str, Any]) -> None:
    """Reject one response per prompt for estimators that compare a response with the others of its prompt."""
    responses, estimator = config["actor_rollout_ref"]["rollout"]["n"], config["algorithm"]["adv_estimator"]
    if responses == 1 and estimator in ("grpo", "grpo_passk", "rloo", "opo"):
        raise ConfigurationError(
            f"actor_rollout_ref.rollout.n=1 is invalid: algorithm.adv_estimator={estimator} compares the responses of "
            "a prompt, so nothing is learnt. Set it to at least 2"
        )


def check_reward_manager(config: Mapping[str, Any]) -> None:
    """Reject the dapo reward manager: verl's main_ppo passes the same arguments to all, without dapo's penalty."""
    if config["reward_model"]["reward_manager"] == "dapo":
        raise ConfigurationError(
            "reward_model.reward_manager=dapo is invalid: it is the naive one with a penalty whose settings verl's "
            "main_ppo does not pass. Set it to naive, to which reward_model.overlong_buffer.enable=True adds the same "
            "penalty"
        )


def check_recomputation(config: Mapping[str, Any]) -> None:
    """Check that granularity, method and number of layers are given if recomputation is switched on."""
    model = config["actor_rollout_ref"]["model"]
    key, asked = "actor_rollout_ref.model.gradient_checkpointing_kwargs", model["gradient_checkpointing_kwargs"]
    granularity = asked["activations_checkpoint_granularity"]
    if model["enable_gradient_checkpointing"] and granularity is None:
        raise ConfigurationError(
            f"{key}.activations_checkpoint_granularity=null recomputes nothing with "
            "actor_rollout_ref.model.enable_gradient_checkpointing=True. Set it to full or selective"
        )
    for name in ("method", "num_layers"):
        if (
            model["enable_gradient_checkpointing"]
            and granularity == "full"
            and asked[f"activations_checkpoint_{name}"] is None
        ):
            raise ConfigurationError(
                f"{key}.activations_checkpoint_{name}=null is invalid: full recomputation needs it. Set it"
            )
