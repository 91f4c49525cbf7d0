"""Turns the overlay on: importing this module finds and applies all patches.

Either verl imports it, by the one line `from verl_patches import prelude_patch`, or an entry point does, together with
`runtime_env={"worker_process_setup_hook": prelude_patch.activate}` for its Ray workers. It imports nothing of upstream.
A process that was started as verl's own command, `python3 -m verl.trainer.main_ppo`, is replaced by the overlay's.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import overlay

_VERLS_MODULE, _VERLS_FILE = "verl.trainer.main_ppo", os.path.join("verl", "trainer", "main_ppo.py")
_OURS = "verl_patches.trainer.verl_command"
_ROOT = str(Path(__file__).resolve().parents[1])


def activate() -> None:
    """Apply all patches in this process, now or when their targets are imported. A second call does nothing."""
    overlay.activate()


def command_of_ours(started: Sequence[str]) -> list[str] | None:
    """Return the overlay's command in the place of verl's; None if `started` is not verl's command.

    Args:
        started: the words that this process was started with.
    """
    for index, word in enumerate(started):
        if word == _VERLS_MODULE and started[index - 1] == "-m":
            return [*started[:index], _OURS, *started[index + 1 :]]
        if word == f"-m{_VERLS_MODULE}" or (word.endswith(_VERLS_FILE) and not started[index - 1] == "-c"):
            return [*started[:index], "-m", _OURS, *started[index + 1 :]]
    return None


def _become_ours() -> None:
    """Replace this process by the overlay's command if it was started as verl's, before any of verl's code runs.

    The command keeps the process id, open files and environment.
    """
    words = command_of_ours(sys.orig_argv)
    if words is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        path = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        os.execve(sys.executable, words, os.environ | {"PYTHONPATH": path})


_become_ours()
activate()
