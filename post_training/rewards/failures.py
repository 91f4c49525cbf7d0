"""Counting the failures of a reward function, which verl's loop and its `prime` manager print and pass over.

verl scores the batch once more and goes on; what it is given then may be right or may not. A run says so at its end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from post_training.report.faults import REWARD_FAILED
from post_training.report.run_error import RunError

_LONGEST_MESSAGE = 300
_failures: list[str] = []
_counting = False


class RewardError(RunError):
    """The reward function failed, and verl did not get a score; the message is one sentence."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, "reward_error")


@contextmanager
def counted() -> Iterator[None]:
    """In the block somebody takes the failures of this process with `take`."""
    global _counting
    _counting = True
    _failures.clear()
    try:
        yield
    finally:
        _counting = False


def take() -> list[str]:
    """The failures since the last call, a line each; they are forgotten."""
    taken = list(_failures)
    _failures.clear()
    return taken


def note(failure: str) -> None:
    """Count one failure."""
    _failures.append(failure)


def observed(reward: Callable[..., Any]) -> Callable[..., Any]:
    """`reward` that notes what it raises and raises it."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            return reward(*args, **kwargs)
        except Exception as error:
            note(in_words(error))
            raise

    return noting


def require_nobody_missed() -> None:
    """Raise RewardError if this process has failures that nobody takes: verl may score in a process of its own."""
    if _failures and not _counting:
        raise RewardError(f"{REWARD_FAILED} ({take()[0]})")


def in_words(error: BaseException) -> str:
    """The type and the first line of an exception."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:_LONGEST_MESSAGE].removesuffix(": ")
