"""Compare two mathematical answers by algebra, within a time limit that is always enforced.

Computer algebra on a model's output may never end (and some of it blocks signals), so a time limit inside the same
process cannot be enforced.
"""

import logging
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from post_training.rewards import batch, counts
from post_training.rewards.answers import LONGEST_ANSWER
from post_training.rewards.process import ComparisonLost, ComparisonTimeout, shared_pool

_LOG = logging.getLogger(__name__)
# Results that are kept: responses to one prompt often repeat an answer, and old steps' answers do not come again.
_REMEMBERED = 1 << 16
_SHOWN_CHARACTERS = 80


class Comparing(Protocol):
    """Interface for comparing answers: `AlgebraProcess`, `AlgebraPool`, or a test's stand-in."""

    def equal(self, truth: str, answer: str, limit_s: float) -> bool:
        """Return whether two answers are equal, or raise ComparisonTimeout or ComparisonLost."""
        ...


@dataclass(frozen=True)
class Limits:
    """Limits for comparisons by algebra.

    Attributes:
        time_limit_s: seconds that one comparison may take.
        budget_s: seconds that the comparisons of one batch may take in total; see `batch`.
        workers: most processes in which comparisons run; 0 means one per core, but at most `MOST_WORKERS`.
    """

    time_limit_s: float = 5.0
    budget_s: float = 600.0
    workers: int = 0

    def __post_init__(self) -> None:
        for name in ("time_limit_s", "budget_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"{name}={value} is invalid. Set it to a number of seconds above 0.")
        cores = len(os.sched_getaffinity(0))
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or not 0 <= self.workers <= cores:
            raise ValueError(
                f"workers={self.workers} is invalid: the process has {cores} cores on this machine. Set it to a whole "
                f"number from 1 to {cores}, or to 0 for the default."
            )


class Verifier:
    """Compares answers with math-verify in other processes; safe to share between threads.

    A pair of answers is compared once: responses with the same answer to the same prompt get the same result, and an
    endless comparison costs its limit once, even if several threads ask at the same time.

    Args:
        time_limit_s: see `Limits`.
        process: runs the comparisons; None means the pool that all verifiers share.
        budget_s: see `Limits`.
    """

    def __init__(
        self,
        time_limit_s: float = Limits.time_limit_s,
        process: Comparing | None = None,
        budget_s: float = Limits.budget_s,
    ) -> None:
        self.limits = Limits(time_limit_s, budget_s)
        self._process = process or shared_pool()
        self._results: dict[tuple[str, str], Future[bool]] = {}
        self._guard = threading.Lock()

    def equal(self, truth: str, answer: str) -> bool:
        r"""Return whether ``answer`` equals ``truth`` (LaTeX or plain text, no ``\boxed``); False without a result."""
        if max(len(truth), len(answer)) > LONGEST_ANSWER:
            return False
        pair = (truth, answer)
        with self._guard:
            result = self._results.get(pair)
            if first := result is None:
                while len(self._results) >= _REMEMBERED:
                    self._results.pop(next(iter(self._results)))
                result = self._results[pair] = Future()
        if first:
            self._decide(pair, result)
        return result.result()

    def _decide(self, pair: tuple[str, str], result: Future[bool]) -> None:
        """Compare for all threads that wait for this pair; an error is raised in all of them, and is not remembered."""
        try:
            result.set_result(self._compare(*pair))
        except BaseException as error:
            with self._guard:
                self._results.pop(pair, None)
            result.set_exception(error)

    def _compare(self, truth: str, answer: str) -> bool:
        asked = batch.current()
        limit = self.limits.time_limit_s
        if asked is not None:
            allowed = asked.limit_s(limit, self.limits.budget_s)
            if allowed is None:
                counts.add(counts.OVER_BUDGET)
                return False
            limit = allowed
        begin = time.monotonic()
        try:
            return self._process.equal(truth, answer, limit)
        except ComparisonTimeout:
            counts.add(counts.TIMED_OUT)
            _LOG.warning("no result for %r within %g s: counted as wrong", _shown(answer), limit)
            return False
        except ComparisonLost:
            counts.add(counts.LOST)
            _LOG.warning("comparing %r ended its process: counted as wrong", _shown(answer))
            return False
        finally:
            if asked is not None:
                asked.spend(time.monotonic() - begin)


def _shown(answer: str) -> str:
    return answer if len(answer) <= _SHOWN_CHARACTERS else answer[: _SHOWN_CHARACTERS - 3] + "..."
