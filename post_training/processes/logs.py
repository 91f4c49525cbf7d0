"""The end of what a command printed."""

from pathlib import Path


def last_error(log: Path) -> str:
    """Returns the sentence after the last ``error: `` of a log, or its last line that is not empty."""
    errors = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else last_line(log) or "it printed nothing"


def last_line(log: Path) -> str:
    """Returns the last line of a log that is not empty; "" where there is none."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
