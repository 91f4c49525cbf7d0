"""Findings of the health checks, and the commands that they run."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        what: the thing that was checked.
        detail: what was found.
        remedy: empty if all is well.
        known: False if it could not be checked.
    """

    what: str
    detail: str
    remedy: str = ""
    known: bool = True

    @property
    def state(self) -> str:
        """`ok`, `BAD` or `?`."""
        return "BAD" if self.remedy else "ok" if self.known else "?"

    def line(self) -> str:
        """Format the finding as one line of a report."""
        return f"{self.state:<4}{self.what:<22}{self.detail}" + (f"; {self.remedy}" if self.remedy else "")


def ask(*command: str) -> str | None:
    """Return the output of a command; None if it is not installed, fails, or does not end within a minute."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
