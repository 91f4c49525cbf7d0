"""The rule rewards in the form that verl's ``custom_reward_function`` configuration loads.

custom_reward_function.path=verl_patches/utils/reward/rule_reward.py
custom_reward_function.name=compute_score             # or compute_score_and_accuracy, compute_score_and_format
+custom_reward_function.reward_kwargs.rule=boxed
+custom_reward_function.reward_kwargs.time_limit_s=5
+custom_reward_function.reward_kwargs.budget_s=600    # seconds of algebra per batch
+custom_reward_function.reward_kwargs.workers=0       # processes of algebra; 0: one per core, 8 at most

verl executes this file when it builds its reward managers, before any model: the algebra's process imports its library
while the models are built, so that the first sample does not wait for it.
"""

from functools import cache
from typing import Any

from post_training.rewards import accuracy, batch, has_form, score
from post_training.rewards.process import shared_pool
from post_training.rewards.verifier import Limits, Verifier

shared_pool().prepare()
batch.declare_safe_for_threads()


@cache
def _verifier(limits: Limits) -> Verifier:
    if limits.workers:
        shared_pool().resize(limits.workers)
    return Verifier(limits.time_limit_s, budget_s=limits.budget_s)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    rule: str = "boxed",
    time_limit_s: float = Limits.time_limit_s,
    budget_s: float = Limits.budget_s,
    workers: int = Limits.workers,
) -> float:
    """Score one response under verl's calling convention; every data source is scored by the same rule.

    Args:
        data_source: where the prompt comes from; not used.
        solution_str: the decoded response.
        ground_truth: the right answer.
        extra_info: further columns of the sample; not used.
        rule: a name in ``post_training.rewards.RULES``.
        time_limit_s: seconds that the algebra may spend on one sample; after that the answer counts as wrong.
        budget_s: seconds that it may spend on one batch; see ``post_training.rewards.batch``.
        workers: the most processes in which it runs; 0 for one per core and 8 at most.
    """
    return score(solution_str, str(ground_truth), _verifier(Limits(time_limit_s, budget_s, workers)), rule)


def compute_score_and_accuracy(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    rule: str = "boxed",
    time_limit_s: float = Limits.time_limit_s,
    budget_s: float = Limits.budget_s,
    workers: int = Limits.workers,
) -> dict[str, float]:
    """Return the score of `compute_score`, and the accuracy as acc, which a penalty on the score does not change."""
    found = compute_score(data_source, solution_str, ground_truth, extra_info, rule, time_limit_s, budget_s, workers)
    return {"score": found, "acc": accuracy(found, rule)}


def compute_score_and_format(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    rule: str = "boxed",
    time_limit_s: float = Limits.time_limit_s,
    budget_s: float = Limits.budget_s,
    workers: int = Limits.workers,
) -> dict[str, float]:
    """Return score and accuracy, and format: 1.0 if there is an answer in the place where the rule looks for it.

    The format earns no reward; verl's validation shows it as a metric of its own.
    """
    found = compute_score_and_accuracy(
        data_source, solution_str, ground_truth, extra_info, rule, time_limit_s, budget_s, workers
    )
    return found | {"format": float(has_form(solution_str, rule))}
