r"""The rules that score a response: 1.0 for a right answer and 0.0 for a wrong one.

``boxed`` (the default) compares the last ``\boxed{...}`` of the response with the truth: as text, as numbers, and,
where neither decides, by algebra with a time limit a comparison. A truth that is empty or NaN is met by no response.

``substring`` is the published recipe's rule, kept for comparison: right when the truth occurs anywhere in the response.
It is weak in both directions: "I count 12 of them: \boxed{7}" is right against the truth "2", and ``\boxed{0.5}`` is
wrong against ``\frac{1}{2}``.
"""

from collections.abc import Callable

from post_training.rewards.answers import is_answer, last_boxed, plain
from post_training.rewards.comparison import equal_answers
from post_training.rewards.judge import Judge

_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"


def score_boxed(response: str, truth: str, judge: Judge) -> float:
    r"""Returns 1.0 when the last ``\boxed{...}`` after the thinking part equals ``truth``, otherwise 0.0.

    Thoughts that begin and do not end hold no answer either.
    """
    answer = last_boxed(response.rpartition(_END_OF_THOUGHT)[2].partition(_THOUGHT)[0])
    return float(answer is not None and equal_answers(plain(truth), plain(answer), judge))


def score_substring(response: str, truth: str, judge: Judge) -> float:
    """Returns 1.0 when ``truth`` occurs anywhere in ``response``; see the module's text for what that misses."""
    return float(truth in response)


RULES: dict[str, Callable[[str, str, Judge], float]] = {"boxed": score_boxed, "substring": score_substring}


def score(response: str, truth: str, judge: Judge, rule: str = "boxed") -> float:
    """Scores one response.

    Raises:
        ValueError: ``rule`` is not a key of ``RULES``.
    """
    if rule not in RULES:
        raise ValueError(f"The reward rule {rule!r} does not exist; choose one of: {', '.join(RULES)}.")
    return RULES[rule](response, truth, judge) if is_answer(truth) else 0.0
