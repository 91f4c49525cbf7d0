"""The exception for failed runs, of which the user sees only the message."""

from __future__ import annotations

from post_training.start_status import Cause


class RunError(RuntimeError):
    """The run failed; the message is one sentence for the user, who does not need a traceback.

    `reason` is the cause by which a supervisor decides; None if it can only tell from log and exit code.
    """

    def __init__(self, sentence: str, reason: Cause | None = None) -> None:
        super().__init__(sentence)
        self.reason = reason


def original(error: BaseException) -> BaseException:
    """Return the exception that was raised first, from those that Ray wrapped around it in each process (`cause`)."""
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    return error
