"""When a rollout batch leads to exactly one update, by the number of updates that verl's actor makes of it."""

import pytest

from verl_patches.features.onpolicy.conditions import reason_old_log_prob_is_needed
from verl_patches.trainer.main_ppo import compose

ACTOR = "actor_rollout_ref.actor"
FILTERED = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc")


def sizes(train, mini, gen_batch=None):
    """Return overrides: prompts of a step, of an update, and of a generation batch, which only filtering uses."""
    given = [f"data.train_batch_size={train}", f"{ACTOR}.ppo_mini_batch_size={mini}"]
    return [*given, f"++data.gen_batch_size={gen_batch}"] if gen_batch else given


@pytest.mark.parametrize(
    ("overrides", "updates"),
    [
        (sizes(8, 8), None),
        (sizes(8, 4), "splits the 8 prompts of a rollout batch into 2 updates"),
        # verl trains on everything that its loader returns.
        (sizes(8, 8, gen_batch=16), "splits the 16 prompts of a rollout batch into 2 updates"),
        (sizes(8, 16, gen_batch=16), None),
        # With filtered prompts it trains on train_batch_size of them, whatever the size of a generation batch.
        ([*sizes(8, 8, gen_batch=16), *FILTERED], None),
        ([*sizes(8, 4, gen_batch=4), *FILTERED], "splits the 8 prompts of a rollout batch into 2 updates"),
        ([*sizes(8, 16, gen_batch=16), *FILTERED], "splits the 8 prompts of a rollout batch into 0.5 updates"),
    ],
)
def test_updates_are_counted_by_the_prompts_trained_on(overrides, updates):
    reason = reason_old_log_prob_is_needed(compose("rehearsal", overrides))
    assert reason is None if updates is None else updates in reason


@pytest.mark.parametrize("key", [f"{ACTOR}.ppo_epochs=2", "algorithm.use_kl_in_reward=true"])
def test_another_reader_of_old_log_prob_is_named(key):
    name = key.partition("=")[0]
    assert reason_old_log_prob_is_needed(compose("rehearsal", [*sizes(8, 8), key])).startswith(name)
