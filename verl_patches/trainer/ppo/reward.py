"""verl's rewards: a function that fails is counted, although verl passes over it."""

from overlay import wrap
from verl_patches.features.measure.feature import MEASURE

_METADATA = {
    "feature": MEASURE,
    "upstream": "not forwarded: part of this project's features",
    "remove_when": "verl says at the end of a run how often the reward function failed",
}


@wrap(
    "verl.trainer.ppo.reward:compute_reward",
    why="verl prints what a reward function raises, scores the batch once more and goes on as if nothing had been",
    evidence="executed",
    **_METADATA,
)
def compute_reward(upstream, data, reward_fn):
    from verl_patches.features.reward import failures

    try:
        result = upstream(data, failures.observed(reward_fn))
    except Exception as error:
        raise failures.RewardError(f"the reward function failed twice ({failures.in_words(error)})") from error
    failures.require_nobody_missed()
    return result
