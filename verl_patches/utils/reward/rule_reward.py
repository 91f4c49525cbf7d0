"""The rule rewards in the form that verl's ``custom_reward_function`` configuration loads.

custom_reward_function.path=verl_patches/utils/reward/rule_reward.py
custom_reward_function.name=compute_score             # or compute_score_and_accuracy, compute_score_and_format
+custom_reward_function.reward_kwargs.rule=boxed
+custom_reward_function.reward_kwargs.time_limit_s=5

verl executes this file when it builds its reward managers, before any model: the algebra's process imports its library
while the models are built, and the first sample does not wait for it.
"""

from functools import cache
from typing import Any

from post_training.rewards import has_form, score
from post_training.rewards.judge import Judge
from post_training.rewards.process import shared_process

shared_process().prepare()


@cache
def _judge(time_limit_s: float) -> Judge:
    return Judge(time_limit_s)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    rule: str = "boxed",
    time_limit_s: float = 5.0,
) -> float:
    """Scores one response under verl's calling convention; every data source is scored by the same rule.

    Args:
        data_source: where the prompt comes from; not used.
        solution_str: the decoded response.
        ground_truth: the right answer.
        extra_info: further columns of the sample; not used.
        rule: a name in ``post_training.rewards.RULES``.
        time_limit_s: seconds that the algebra may spend on one sample; after that the answer counts as wrong.
    """
    return score(solution_str, str(ground_truth), _judge(float(time_limit_s)), rule)


def compute_score_and_accuracy(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    rule: str = "boxed",
    time_limit_s: float = 5.0,
) -> dict[str, float]:
    """The same score, and beside it as acc, which stays what it is when a penalty is taken from the score."""
    found = compute_score(data_source, solution_str, ground_truth, extra_info, rule, time_limit_s)
    return {"score": found, "acc": found}


def compute_score_and_format(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    rule: str = "boxed",
    time_limit_s: float = 5.0,
) -> dict[str, float]:
    """The same score and accuracy, and format: 1.0 where there is an answer where the rule looks for it.

    The form earns nothing; verl's validation shows it as a metric of its own.
    """
    found = compute_score_and_accuracy(data_source, solution_str, ground_truth, extra_info, rule, time_limit_s)
    return found | {"format": float(has_form(solution_str, rule))}
