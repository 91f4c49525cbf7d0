"""Count the sets of rollout weights, to reject generation while a set is only partly written."""

from collections.abc import Iterator
from contextlib import contextmanager


class WeightsNotWholeError(RuntimeError):
    """Generation was requested while the rollout weights were not a complete set."""


class WeightsGeneration:
    """Counts sets of rollout weights: a set begins when the previous one is discarded, and is committed when it is
    complete. In between generation is rejected for any reason, until a set is complete."""

    def __init__(self) -> None:
        self._begun = self._committed = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Begin a set, all of whose weights are written in the block. After an exception the set stays incomplete."""
        self.discard()
        yield
        self._committed = self._begun

    def discard(self) -> None:
        """Discard the weights: the content of their memory is invalid until the next complete set."""
        if self._begun == self._committed:
            self._begun += 1

    def require_whole(self) -> None:
        """Raise WeightsNotWholeError unless the last set that was begun is complete.

        Before the first set was begun or discarded, the weights are not managed here and nothing is raised.
        """
        if self._begun != self._committed:
            raise WeightsNotWholeError(
                f"the rollout weights are incomplete: set {self._begun} did not finish (the last complete one was "
                f"{self._committed}). Generate only after a reshard has succeeded"
            )
