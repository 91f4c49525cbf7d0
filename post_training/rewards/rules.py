r"""The rules that score a response: 1.0 for a right answer and 0.0 for a wrong one.

``boxed`` (the default) compares the last ``\boxed{...}`` of the response with the truth: as text, as numbers, and,
where neither decides, by algebra with a time limit a comparison. A truth that is empty or NaN is met by no response.

``gsm8k`` compares the number after the last ``####`` in the same way, for prompts that ask for it there. verl's own
rule takes the first one, and never finds ``5.`` equal to 5.

``substring`` is the published recipe's rule, kept for comparison: right when the truth occurs anywhere in the response.
It is weak in both directions: "I count 12 of them: \boxed{7}" is right against the truth "2", and ``\boxed{0.5}`` is
wrong against ``\frac{1}{2}``.
"""

import re
from collections.abc import Callable

from post_training.rewards.answers import is_answer, last_boxed, plain
from post_training.rewards.comparison import equal_answers
from post_training.rewards.judge import Judge

_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"
_MARKED = re.compile(r"####\s*\$?\s*(-?\s*\$?[0-9][0-9.,]*)")


def boxed_answer(response: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` after the thinking part; None where there is none.

    Thoughts that begin and do not end hold no answer either.
    """
    return last_boxed(_spoken(response))


def marked_answer(response: str) -> str | None:
    """The number after the last ``####`` after the thinking part, without dollar sign and full stop; None for none."""
    found = _MARKED.findall(_spoken(response))
    return found[-1].replace("$", "").replace(" ", "").rstrip(".,") if found else None


def _spoken(response: str) -> str:
    return response.rpartition(_END_OF_THOUGHT)[2].partition(_THOUGHT)[0]


ANSWERS: dict[str, Callable[[str], str | None]] = {"boxed": boxed_answer, "gsm8k": marked_answer}
"""Where a rule looks for the answer, for the rules that look somewhere."""


def score_boxed(response: str, truth: str, judge: Judge) -> float:
    r"""Returns 1.0 when the last ``\boxed{...}`` after the thinking part equals ``truth``, otherwise 0.0."""
    return _equal(boxed_answer(response), truth, judge)


def score_gsm8k(response: str, truth: str, judge: Judge) -> float:
    """Returns 1.0 when the number after the last ``####`` equals ``truth``, otherwise 0.0."""
    return _equal(marked_answer(response), truth, judge)


def _equal(answer: str | None, truth: str, judge: Judge) -> float:
    return float(answer is not None and equal_answers(plain(truth), plain(answer), judge))


def score_substring(response: str, truth: str, judge: Judge) -> float:
    """Returns 1.0 when ``truth`` occurs anywhere in ``response``; see the module's text for what that misses."""
    return float(truth in response)


RULES: dict[str, Callable[[str, str, Judge], float]] = {
    "boxed": score_boxed,
    "substring": score_substring,
    "gsm8k": score_gsm8k,
}


def has_form(response: str, rule: str = "boxed") -> bool:
    """Whether there is an answer where the rule looks for one; a rule that looks everywhere finds every form right."""
    return rule not in ANSWERS or ANSWERS[rule](response) is not None


def score(response: str, truth: str, judge: Judge, rule: str = "boxed") -> float:
    """Scores one response.

    Raises:
        ValueError: ``rule`` is not a key of ``RULES``.
    """
    if rule not in RULES:
        raise ValueError(f"The reward rule {rule!r} does not exist; choose one of: {', '.join(RULES)}.")
    return RULES[rule](response, truth, judge) if is_answer(truth) else 0.0
