r"""The rules that score a response: 1.0 for a right answer and 0.0 for a wrong one, except ``geo3k``.

``boxed`` (the default) compares the last ``\boxed{...}`` of the response with the truth: as text, as numbers, and, if
neither decides, by algebra with a time limit per comparison. An empty or NaN ground truth scores 0.

``gsm8k`` compares the text after the last ``####`` on its line in the same way, for prompts that ask for this form.
verl's own rule takes the first one, and never finds ``5.`` equal to 5.

``geo3k`` is verl's reward for Geometry3K: nine tenths for an answer that ``boxed`` finds right, and one tenth for the
form ``<think>...</think>...\boxed{...}``.

``substring`` is the published recipe's rule, kept for comparison: right if the truth occurs anywhere in the response.
It errs in both directions: "I count 12 of them: \boxed{7}" is right against the truth "2", and ``\boxed{0.5}`` is wrong
against ``\frac{1}{2}``.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from post_training.rewards import counts
from post_training.rewards.answers import LONGEST_ANSWER, is_answer, last_boxed, plain
from post_training.rewards.comparison import equal_answers
from post_training.rewards.doubts import END_TOKEN, doubts, is_doubted
from post_training.rewards.process import WorkerError
from post_training.rewards.verifier import Verifier

_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"
_MARK = "####"
_ANSWER_SHARE, _FORM_SHARE = 0.9, 0.1
_BOX_COMMANDS = ("\\boxed", "\\fbox", "\\framebox")
_OPEN: ContextVar[bool] = ContextVar("thought_is_open", default=False)
_LOG = logging.getLogger(__name__)


@contextmanager
def prompt_opens_thought(opened: bool) -> Iterator[None]:
    """Set for the block whether prompts end with ``<think>``: responses without ``</think>`` are then only thoughts."""
    token = _OPEN.set(opened)
    try:
        yield
    finally:
        _OPEN.reset(token)


def boxed_answer(response: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` after the thinking part; None if there is none.

    Thoughts that do not end contain no answer. Templates of reasoning models open them in the prompt, which a rule does
    not see: outside `prompt_opens_thought`, a box counts as a thought if the text doubts it and has no ``</think>``.
    """
    spoken = _spoken(response)
    if _END_OF_THOUGHT not in response and is_doubted(spoken, max(0, *map(spoken.rfind, _BOX_COMMANDS))):
        return None
    return last_boxed(spoken)


def marked_answer(response: str) -> str | None:
    """Return the line after the last ``####`` that has a number, after the thinking part; None if there is none.

    The text may begin on the next line that is not empty. The whole line is the answer: ``5-7`` is not 5.
    """
    spoken = _spoken(response)
    if _END_OF_THOUGHT not in response and doubts(spoken, max(0, spoken.rfind(_MARK))):
        return None
    for after in reversed(spoken.split(_MARK)[1:]):
        line = after.lstrip().lstrip("#").lstrip().partition("\n")[0]
        if any(map(str.isdigit, line)):
            return END_TOKEN.sub("", line[: LONGEST_ANSWER + 1]).strip()
    return None


def _spoken(response: str) -> str:
    if _OPEN.get() and _END_OF_THOUGHT not in response:
        return ""
    return response.rpartition(_END_OF_THOUGHT)[2].partition(_THOUGHT)[0]


ANSWERS: dict[str, Callable[[str], str | None]] = {"boxed": boxed_answer, "gsm8k": marked_answer}
"""Functions that find the answer, for the rules that look for one in a certain place."""


def score_boxed(response: str, truth: str, verifier: Verifier) -> float:
    r"""Return 1.0 if the last ``\boxed{...}`` after the thinking part equals ``truth``, otherwise 0.0."""
    return _equal(boxed_answer(response), truth, verifier)


def score_gsm8k(response: str, truth: str, verifier: Verifier) -> float:
    """Return 1.0 if the answer after the last ``####`` equals ``truth``, otherwise 0.0."""
    return _equal(marked_answer(response), truth, verifier)


def _equal(answer: str | None, truth: str, verifier: Verifier) -> float:
    return float(answer is not None and equal_answers(plain(truth), plain(answer), verifier))


def has_thinking_form(response: str) -> bool:
    r"""Return whether a response has thoughts between tags and then a ``\boxed{...}``, as verl's Geometry3K rule asks.

    The time is linear in its length.
    """
    if not response.startswith(_THOUGHT):
        return False
    position = len(_THOUGHT)
    for mark in (_END_OF_THOUGHT, "\\boxed{", "}"):
        found = response.find(mark, position)
        if found < 0:
            return False
        position = found + len(mark)
    return True


def score_geo3k(response: str, truth: str, verifier: Verifier) -> float:
    """Return 0.9 for a right answer in the box, plus 0.1 for the form."""
    return _ANSWER_SHARE * score_boxed(response, truth, verifier) + _FORM_SHARE * has_thinking_form(response)


def accuracy(score: float, rule: str) -> float:
    """Return the accuracy that a score implies: 1.0 for a right answer."""
    return float(score >= _ANSWER_SHARE) if rule == "geo3k" else score


def score_substring(response: str, truth: str, verifier: Verifier) -> float:
    """Return 1.0 if ``truth`` occurs anywhere in ``response``; see the module docstring for the errors of this rule."""
    return float(truth in response)


RULES: dict[str, Callable[[str, str, Verifier], float]] = {
    "boxed": score_boxed,
    "substring": score_substring,
    "gsm8k": score_gsm8k,
    "geo3k": score_geo3k,
}


def has_form(response: str, rule: str = "boxed") -> bool:
    """Return whether the rule finds an answer where it looks for one; always true for a rule that looks everywhere."""
    if rule == "geo3k":
        return has_thinking_form(response)
    return rule not in ANSWERS or ANSWERS[rule](response) is not None


def score(response: str, truth: str, verifier: Verifier, rule: str = "boxed") -> float:
    """Score one response; a rule that raises scores 0 and is counted (`counts`).

    Raises:
        ValueError: ``rule`` is not a key of ``RULES``.
        RuntimeError: the process for algebra cannot be started, so no answer could be judged.
    """
    if rule not in RULES:
        raise ValueError(f"The reward rule {rule!r} does not exist. Choose one of: {', '.join(RULES)}.")
    try:
        return RULES[rule](response, truth, verifier) if is_answer(truth) else 0.0
    except WorkerError:
        raise
    except Exception as error:
        counts.add(counts.RULE_ERRORS)
        _LOG.warning("rule %s raised %s on an answer to %r: counted as wrong", rule, type(error).__name__, truth[:80])
        return 0.0
