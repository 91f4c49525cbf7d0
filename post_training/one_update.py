"""Check whether the log-prob of an update's own forward can serve as old_log_prob.

PPO's ratio is exp(log_prob - old_log_prob), where old_log_prob belongs to the weights that generated the batch. If a
rollout batch is used for exactly one update, the update's forward runs with those very weights, so old_log_prob is
log_prob without its gradient and the ratio is exactly 1 while its gradient stays that of log_prob.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def reason_old_log_prob_is_needed(config: Mapping[str, Any], prompts: int) -> str | None:
    """Return why this run needs old_log_prob before its update, as the end of a sentence; None if it does not.

    Args:
        config: verl's composed configuration.
        prompts: number of prompts in a rollout batch.
    """
    actor = config["actor_rollout_ref"]["actor"]
    if actor["ppo_epochs"] != 1:
        return f"actor_rollout_ref.actor.ppo_epochs={actor['ppo_epochs']}; set it to 1"
    mini = actor["ppo_mini_batch_size"]
    if mini != prompts:
        return (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} splits the {prompts} prompts of a rollout batch into "
            f"{prompts / mini:g} updates; set the two equal"
        )
    if config["algorithm"]["use_kl_in_reward"]:
        return "algorithm.use_kl_in_reward=True needs it before the update; set it to False"
    return None
