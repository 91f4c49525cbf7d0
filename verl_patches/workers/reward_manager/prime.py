"""Patch of verl's `prime` reward manager: it counts answers whose reward function failed or ran out of time, which
score 0, and reports every answer as progress to the hang detector."""

from collections.abc import Awaitable, Callable
from typing import Any

from overlay import wrap
from verl_patches.features.measure.feature import MEASURE


@wrap(
    "verl.workers.reward_manager.prime:single_compute_score",
    feature=MEASURE,
    why="verl prints the reward function's exception and scores the answer 0, as if it were wrong",
    upstream="docs/upstream/verl-swallowed-reward-errors.md",
    remove_when="verl reports at the end of a run how often the reward function failed",
)
async def single_compute_score(
    upstream: Callable[..., Awaitable[Any]],
    evaluation_func: Callable[..., Any],
    completion: str,
    reference: Any,
    task: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    from post_training.hang_detection.signs import process_signs

    score = await upstream(evaluation_func, completion, reference, task, *args, **kwargs)
    process_signs().progress()  # here, since the function itself runs in another process
    if score is None:
        from post_training.rewards import failures

        failures.note("no score within its time, or an exception, which verl has printed")
    return score
