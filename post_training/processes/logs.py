"""The last lines of a command's output."""

from pathlib import Path

_CRASH = "Fatal Python error: "
# torch_npu prints this when Python ends with any exception, after the exception.
_UNKNOWN = "ERR99999 UNKNOWN"


def last_error(log: Path) -> str:
    """Return the sentence after the last ``error: `` of a log, or else its last words."""
    text = log.read_text(errors="replace")
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else last_words(text) or "it printed nothing"


def last_words(text: str) -> str:
    """Return the last line that is not empty, "" if there is none.

    If Python crashed, return the line that names the crash: Python prints its threads and all module names after it.
    torch_npu's line for an unknown error is only returned if there is no other.
    """
    lines = text.splitlines()
    crashes = [line for line in lines if line.startswith(_CRASH)]
    if crashes:
        return crashes[-1]
    return _last_line("\n".join(line for line in lines if _UNKNOWN not in line)) or _last_line(text)


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty; "" if there is none."""
    return _last_line(log.read_text(errors="replace"))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
