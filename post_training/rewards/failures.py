"""Count the failures of a reward function, which verl's loop and its `prime` manager only print.

verl then scores the batch once more and continues with the result, right or wrong. A run reports this at its end.
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
    """Declare that the failures of this process in the block are collected with `take`."""
    global _counting
    _counting = True
    _failures.clear()
    try:
        yield
    finally:
        _counting = False


def take() -> list[str]:
    """Return and forget the failures since the last call, one line each."""
    taken = list(_failures)
    _failures.clear()
    return taken


def note(failure: str) -> None:
    """Count one failure."""
    _failures.append(failure)


def observed(reward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `reward` to count every exception before it is raised."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            return reward(*args, **kwargs)
        except Exception as error:
            note(in_words(error))
            raise

    return noting


def require_nobody_missed() -> None:
    """Raise RewardError if nobody collects this process's failures: verl may score in a process of its own."""
    if _failures and not _counting:
        raise RewardError(f"{REWARD_FAILED} ({take()[0]})")


def in_words(error: BaseException) -> str:
    """Return the type and the first line of an exception."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:_LONGEST_MESSAGE].removesuffix(": ")
