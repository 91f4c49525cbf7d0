"""Comparing two mathematical answers by algebra, within a time limit that always holds.

Computer algebra on a model's output may run without end (and some of it holds on to signals), so a time limit inside
the same process is no limit.
"""

import logging
import threading
from concurrent.futures import Future

from post_training.rewards.process import AlgebraProcess, ComparisonLost, ComparisonTimeout, shared_process

_LOG = logging.getLogger(__name__)
# Longer than any answer, and short enough for a request to fit into a pipe at once.
LONGEST_ANSWER = 4096
# The responses to one prompt often repeat an answer, and a step's answers are not asked for again much later.
_REMEMBERED = 1 << 16
_SHOWN_CHARACTERS = 80


class Judge:
    """Compares answers with math-verify in another process; safe to share between threads.

    A pair of answers is compared once: responses with the same answer to the same prompt get the same verdict, and an
    endless comparison costs its limit once, also where several threads ask at the same time.

    Args:
        time_limit_s: seconds that one comparison may take.
        process: where comparisons run; None stands for the one that all judges share.
    """

    def __init__(self, time_limit_s: float = 5.0, process: AlgebraProcess | None = None) -> None:
        if time_limit_s <= 0:
            raise ValueError(f"The time limit of the reward is {time_limit_s} s; it must be above 0.")
        self.time_limit_s = time_limit_s
        self._process = process or shared_process()
        self._verdicts: dict[tuple[str, str], Future[bool]] = {}
        self._guard = threading.Lock()

    def equal(self, truth: str, answer: str) -> bool:
        r"""Says whether ``answer`` equals ``truth`` (LaTeX or plain text, without ``\boxed``); no verdict is no."""
        if max(len(truth), len(answer)) > LONGEST_ANSWER:
            return False
        pair = (truth, answer)
        with self._guard:
            verdict = self._verdicts.get(pair)
            if first := verdict is None:
                while len(self._verdicts) >= _REMEMBERED:
                    self._verdicts.pop(next(iter(self._verdicts)))
                verdict = self._verdicts[pair] = Future()
        if first:
            self._decide(pair, verdict)
        return verdict.result()

    def _decide(self, pair: tuple[str, str], verdict: Future[bool]) -> None:
        """Compares for everyone who waits for this pair; an error is everyone's too, and is not remembered."""
        try:
            verdict.set_result(self._compare(*pair))
        except BaseException as error:
            with self._guard:
                self._verdicts.pop(pair, None)
            verdict.set_exception(error)

    def _compare(self, truth: str, answer: str) -> bool:
        try:
            return self._process.equal(truth, answer, self.time_limit_s)
        except ComparisonTimeout:
            _LOG.warning("no verdict on %r within %g s: it counts as wrong", _shown(answer), self.time_limit_s)
            return False
        except ComparisonLost:
            _LOG.warning("comparing %r ended its process: it counts as wrong", _shown(answer))
            return False


def _shown(answer: str) -> str:
    return answer if len(answer) <= _SHOWN_CHARACTERS else answer[: _SHOWN_CHARACTERS - 3] + "..."
