"""The Python of Ray's workers when its path contains blanks or quotes.

Ray 2.46 writes the path of the driver's Python into two command lines: the raylet's, which puts a path with a blank in
double quotes and leaves any other bare, and, for a worker with a runtime environment, a shell's, which always leaves
it bare. Ray does not report a worker that cannot start: the run waits for it forever.

`python -I -S interpreter.py PATH` fails if Ray would not find a Python at PATH. The set-up runs it before all else.
"""

from __future__ import annotations

import shlex
import subprocess
import sys


def python_of_workers() -> dict[str, str]:
    """Return the entry of a runtime environment that lets a shell find this Python; empty if Ray needs no such help."""
    quoted = shlex.quote(sys.executable)
    return {} if quoted == sys.executable else {"py_executable": quoted}


def is_found_by_raylets(python: str | None = None) -> bool:
    """Return whether a raylet, which splits its command line as a shell does, can start workers with this Python."""
    command = [python or sys.executable]
    try:
        return shlex.split(subprocess.list2cmdline(command)) == command
    except ValueError:  # a quotation that does not end
        return False


if __name__ == "__main__":
    sys.exit(not is_found_by_raylets(sys.argv[1]))
