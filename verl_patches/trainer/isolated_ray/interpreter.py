"""The Python of Ray's workers where its path holds blanks or quotes.

Ray 2.46 writes the path of the driver's Python into two command lines: the raylet's, where a path with a blank is put
in double quotes and any other stands bare, and, for a worker with a runtime environment, a shell's, where it always
stands bare. A worker that cannot start is never missed: the run waits for it for ever.

`python -I -S interpreter.py PATH` fails where a Python at PATH would not be found. The set-up asks so before all else.
"""

from __future__ import annotations

import shlex
import subprocess
import sys


def python_of_workers() -> dict[str, str]:
    """The entry of a runtime environment that lets a shell find this Python; empty where Ray's own way does."""
    quoted = shlex.quote(sys.executable)
    return {} if quoted == sys.executable else {"py_executable": quoted}


def is_found_by_raylets(python: str | None = None) -> bool:
    """Whether a raylet, which takes its command line apart as a shell does, can start workers with this Python."""
    command = [python or sys.executable]
    try:
        return shlex.split(subprocess.list2cmdline(command)) == command
    except ValueError:  # a quotation that does not end
        return False


if __name__ == "__main__":
    sys.exit(not is_found_by_raylets(sys.argv[1]))
