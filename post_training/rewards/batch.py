"""A batch of answers that are judged together: what their slow comparisons may cost, and all of them at the same time.

Reward managers ask for one answer after the other, so that one slow comparison holds up all that follow, and a batch of
slow ones takes its time limit times their number. Here a batch has a budget. Until it is spent every comparison has its
time limit; until twice as much is spent, a short one, in which nearly every comparison is over; after that the algebra
is not asked and the answer scores 0. Answers that text and numbers decide cost nothing of it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

SHORT_LIMIT_S = 0.25
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Batch:
    """Counts what the comparisons of one batch have cost; safe to share between threads.

    Args:
        parallel: comparisons that run at the same time; the budget is one of the wall clock.
    """

    def __init__(self, parallel: int = 1) -> None:
        self._parallel = parallel
        self._spent_s = 0.0
        self._lock = threading.Lock()

    def limit_s(self, time_limit_s: float, budget_s: float) -> float | None:
        """The limit of the next comparison; None where it must not begin."""
        with self._lock:
            share = self._spent_s / (budget_s * self._parallel)
        if share < 1:
            return time_limit_s
        return min(time_limit_s, SHORT_LIMIT_S) if share < 2 else None

    def spend(self, seconds: float) -> None:
        """Count a comparison of so many seconds."""
        with self._lock:
            self._spent_s += seconds


_current: list[Batch] = []
_safe_for_threads = False


def current() -> Batch | None:
    """The batch that is being judged in this process, if somebody opened one."""
    return _current[-1] if _current else None


@contextmanager
def opened(parallel: int = 1) -> Iterator[Batch]:
    """In the block all comparisons of this process belong to one batch, which begins with its whole budget."""
    batch = Batch(parallel)
    _current.append(batch)
    try:
        yield batch
    finally:
        _current.remove(batch)


def declare_safe_for_threads() -> None:
    """Say that the reward function of this process may be called from several threads at once, in any order."""
    global _safe_for_threads
    _safe_for_threads = True


def is_safe_for_threads() -> bool:
    """Whether `declare_safe_for_threads` was called; a reward function that a user wrote need not be."""
    return _safe_for_threads


def judged_together(score: Callable[[_Item], _Result], items: Sequence[_Item], parallel: int) -> list[_Result]:
    """The scores of `items`, in their order, judged by so many threads within one batch.

    Raises:
        Exception: what `score` raised for the first of the items for which it did.
    """
    with opened(parallel), ThreadPoolExecutor(parallel, thread_name_prefix="reward") as threads:
        return list(threads.map(score, items))


def key_of(solution_str: str, ground_truth: Any, data_source: Any = None, **_: Any) -> tuple[str, str, str]:
    """What a score depends on."""
    return solution_str, str(ground_truth), str(data_source)


def answered(scores: dict[Any, _Result], otherwise: Callable[..., _Result]) -> Callable[..., _Result]:
    """A reward function that finds the scores of `judged_together` by `key_of`, and computes others."""

    def score(**arguments: Any) -> _Result:
        key = key_of(**arguments)
        return scores[key] if key in scores else otherwise(**arguments)

    return score
