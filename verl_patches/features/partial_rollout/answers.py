"""The generated part of an answer, and the steps whose weights generated it."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


def _no_tokens() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


def _no_log_probs() -> NDArray[np.float32]:
    return np.empty(0, np.float32)


@dataclass(frozen=True, eq=False)
class Answer:
    """An answer so far.

    Attributes:
        tokens: int32.
        log_probs: float32, of each token under the weights that sampled it.
        segments: (step, tokens sampled in it), in order.
        finished: the answer is complete.
    """

    tokens: NDArray[np.int32] = field(default_factory=_no_tokens)
    log_probs: NDArray[np.float32] = field(default_factory=_no_log_probs)
    segments: tuple[tuple[int, int], ...] = ()
    finished: bool = False

    def grown(self, step: int, tokens: Sequence[int], log_probs: Sequence[float], finished: bool) -> Answer:
        """Return the answer after `step`.

        Args:
            step: the step in which it grew.
            tokens, log_probs: of the whole answer, earlier tokens included.
            finished: whether it is complete.

        Raises:
            ValueError: it does not begin with its earlier tokens.
        """
        had, now = len(self.tokens), np.asarray(tokens, np.int32)
        if not np.array_equal(now[:had], self.tokens):
            raise ValueError(f"an answer came back without the {had} tokens from before step {step}")
        segments = (*self.segments, (step, len(now) - had)) if len(now) > had else self.segments
        return Answer(now, np.asarray(log_probs, np.float32), segments, finished)

    def state(self) -> dict[str, Any]:
        """Return the answer as JSON values; numbers are base64, exact and shorter than their digits."""
        return {
            "tokens": _text(self.tokens),
            "log_probs": _text(self.log_probs),
            "segments": [list(segment) for segment in self.segments],
            "finished": self.finished,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Answer:
        """Restore the answer that `state` returned.

        Raises:
            ValueError: its parts do not fit together.
        """
        tokens, log_probs = _numbers(state["tokens"], np.int32), _numbers(state["log_probs"], np.float32)
        segments = tuple((int(step), int(count)) for step, count in state["segments"])
        if not len(tokens) == len(log_probs) == sum(count for _, count in segments):
            raise ValueError(
                f"an answer has {len(tokens)} tokens, {len(log_probs)} log-probs and "
                f"{sum(count for _, count in segments)} tokens in its segments"
            )
        return cls(tokens, log_probs, segments, bool(state["finished"]))


def _text(numbers: NDArray[Any]) -> str:
    return b64encode(numbers.astype(numbers.dtype.newbyteorder("<")).tobytes()).decode()


def _numbers(text: str, kind: type[Any]) -> NDArray[Any]:
    return np.frombuffer(b64decode(text), np.dtype(kind).newbyteorder("<")).astype(kind)
