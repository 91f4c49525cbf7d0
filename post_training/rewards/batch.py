"""Judge a batch of answers in parallel, with a time budget for their slow comparisons.

Reward managers ask for one answer after the other, so one slow comparison delays all that follow, and a batch of slow
ones takes the time limit times their number. Here a batch has a budget. Until it is spent, every comparison has its
full time limit; until twice the budget is spent, a short one, in which nearly every comparison finishes; after that the
algebra is not asked and the answer scores 0. Answers that text and numbers decide use none of the budget.
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
    """Sums the seconds that the comparisons of one batch have taken; safe to share between threads.

    Args:
        parallel: comparisons that run at the same time; the budget is in wall-clock seconds.
    """

    def __init__(self, parallel: int = 1) -> None:
        self._parallel = parallel
        self._spent_s = 0.0
        self._lock = threading.Lock()

    def limit_s(self, time_limit_s: float, budget_s: float) -> float | None:
        """Return the time limit of the next comparison; None if it must not begin."""
        with self._lock:
            share = self._spent_s / (budget_s * self._parallel)
        if share < 1:
            return time_limit_s
        return min(time_limit_s, SHORT_LIMIT_S) if share < 2 else None

    def spend(self, seconds: float) -> None:
        """Add the seconds of one comparison."""
        with self._lock:
            self._spent_s += seconds


_current: list[Batch] = []
_safe_for_threads = False


def current() -> Batch | None:
    """Return the batch that is being judged in this process, if one was opened."""
    return _current[-1] if _current else None


@contextmanager
def opened(parallel: int = 1) -> Iterator[Batch]:
    """Open a batch with a full budget, to which all comparisons of this process in the block belong."""
    batch = Batch(parallel)
    _current.append(batch)
    try:
        yield batch
    finally:
        _current.remove(batch)


def declare_safe_for_threads() -> None:
    """Declare that this process's reward function may be called from several threads at once, in any order."""
    global _safe_for_threads
    _safe_for_threads = True


def is_safe_for_threads() -> bool:
    """Return whether `declare_safe_for_threads` was called; a user's reward function need not be safe."""
    return _safe_for_threads


def judged_together(score: Callable[[_Item], _Result], items: Sequence[_Item], parallel: int) -> list[_Result]:
    """Return the scores of `items`, in their order, judged by `parallel` threads within one batch.

    Raises:
        Exception: from `score`, for the first of the items for which it raised one.
    """
    with opened(parallel), ThreadPoolExecutor(parallel, thread_name_prefix="reward") as threads:
        return list(threads.map(score, items))


def key_of(solution_str: str, ground_truth: Any, data_source: Any = None, **_: Any) -> tuple[str, str, str]:
    """Return the arguments on which a score depends, as a key."""
    return solution_str, str(ground_truth), str(data_source)


def answered(scores: dict[Any, _Result], otherwise: Callable[..., _Result]) -> Callable[..., _Result]:
    """Return a reward function that looks up `scores` by `key_of`, and calls `otherwise` for others."""

    def score(**arguments: Any) -> _Result:
        key = key_of(**arguments)
        return scores[key] if key in scores else otherwise(**arguments)

    return score
