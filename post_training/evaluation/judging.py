"""Score answers with the reward function of a training."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from post_training.evaluation.problems import Question

_FULL_MARKS = 1.0
RewardFunction = Callable[..., float | Mapping[str, Any]]


class RewardError(ValueError):
    """A reward function cannot be used; the message is one sentence."""


def load_reward(given: str) -> RewardFunction:
    """Load the function `FILE[:FUNCTION]`, by default compute_score; verl calls rewards with the same arguments.

    Raises:
        RewardError: no such file or function, or the file cannot be executed.
    """
    file, _, name = given.partition(":")
    name = name or "compute_score"
    path = Path(file)
    if not path.is_file():
        raise RewardError(f"the reward {file} is not a file. Set it to FILE or FILE:FUNCTION as for training")
    spec = importlib.util.spec_from_file_location("the_reward", path)
    if spec is None or spec.loader is None:
        raise RewardError(f"the reward {file} is not a Python file. Set it to FILE.py or FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"the reward {file} cannot be loaded ({type(error).__name__}: {error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardError(f"the reward {file} has no function {name}. Set it to FILE.py:FUNCTION")
    found: RewardFunction = function
    return found


def judge(reward: RewardFunction, question: Question, text: str, options: Mapping[str, Any]) -> tuple[float, bool]:
    """Return the score of an answer, and whether it is right: `acc`, or the score if there is no `acc`, is 1 or more.

    Raises:
        RewardError: the function raised, or gave no finite number.
    """
    try:
        found = reward(
            data_source=question.source, solution_str=text, ground_truth=question.truth, extra_info=question.extra,
            **options,
        )  # fmt: skip
        score = float(found["score"] if isinstance(found, Mapping) else found)
        accuracy = float(found.get("acc", score)) if isinstance(found, Mapping) else score
    except Exception as error:
        raise RewardError(f"the reward failed on an answer to {_shown(question)}: {error!r}") from error
    if not (math.isfinite(score) and math.isfinite(accuracy)):
        raise RewardError(f"the reward of an answer to {_shown(question)} is {score}, not a finite number")
    return score, accuracy >= _FULL_MARKS


def _shown(question: Question) -> str:
    text = " ".join(question.text.split())
    return repr(text if len(text) <= 60 else text[:57] + "...")
