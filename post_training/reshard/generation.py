"""Which weights a rollout has: a counter that rejects generation with weights that are only half written."""

from collections.abc import Iterator
from contextlib import contextmanager


class WeightsNotWholeError(RuntimeError):
    """Somebody wanted to generate while the rollout weights were no complete set."""


class WeightsGeneration:
    """Counts sets of rollout weights: a set begins when the one before it is given up, and is committed when it is
    complete. In between nobody may generate, however it came to that; only a complete set helps."""

    def __init__(self) -> None:
        self._begun = self._committed = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, all weights are written. After an exception the set stays incomplete."""
        self.discard()
        yield
        self._committed = self._begun

    def discard(self) -> None:
        """The weights are given up; what is in their memory means nothing until the next complete set."""
        if self._begun == self._committed:
            self._begun += 1

    def require_whole(self) -> None:
        """Raise WeightsNotWholeError unless the last set that was begun is complete.

        Before anything was begun or discarded, weights are somebody else's business and nothing is raised.
        """
        if self._begun != self._committed:
            raise WeightsNotWholeError(
                f"the rollout weights are not whole: set {self._begun} is not complete (the last complete one was "
                f"{self._committed}); generate only after a reshard has succeeded"
            )
