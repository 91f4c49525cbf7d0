"""How a run says that it failed: the exception that reaches the user as its sentence alone."""

from __future__ import annotations


class RunError(RuntimeError):
    """The run is not what it should be; the message is one sentence for the user, and no trace would help."""


def original(error: BaseException) -> BaseException:
    """What was raised first, where Ray has handed it from process to process: each of its exceptions has a cause."""
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    return error
