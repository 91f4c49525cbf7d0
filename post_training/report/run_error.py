"""How a run says that it failed: the exception that reaches the user as its sentence alone."""

from __future__ import annotations

from post_training.start_status import Cause


class RunError(RuntimeError):
    """The run is not what it should be; the message is one sentence for the user, and no trace would help.

    reason: the cause by which a supervisor decides; None where only log and exit code tell it.
    """

    def __init__(self, sentence: str, reason: Cause | None = None) -> None:
        super().__init__(sentence)
        self.reason = reason


def original(error: BaseException) -> BaseException:
    """What was raised first, where Ray has handed it from process to process: each of its exceptions has a cause."""
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    return error
