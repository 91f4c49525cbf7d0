"""Read the files of environment variables in scripts/env. Needs only the standard library."""

import re
from pathlib import Path

from post_training.user_files import read_text

_BYTES = 1 << 20


def read_environment(path: Path) -> dict[str, str]:
    """Read ``NAME=value`` lines; a ``#`` at the start of a line or after a space begins a comment."""
    lines = (re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip() for line in read_text(path, _BYTES).splitlines())
    return dict(line.split("=", 1) for line in lines if line)
