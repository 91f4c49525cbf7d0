"""Code that the command lines of both stacks' rehearsals share: environment, printed plan, and exit status.

Needs nothing but the standard library before a run starts.
"""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from post_training.inherited_environment import EnvironmentRejected, check_inherited, drop_inherited
from rehearsal.run_plan import RunPlan

if TYPE_CHECKING:
    from post_training.processes.command import SignalFlag

DONE, FAILED, REJECTED, SIGNALLED = 0, 1, 2, 128


def take_environment() -> int | None:
    """Drop what other jobs left in the environment, and let signals end the process with a status of their own.

    Returns:
        The exit status if the environment is rejected, after printing the reason in one sentence; None otherwise.
    """
    try:
        check_inherited(os.environ)
    except EnvironmentRejected as error:
        return fail(str(error), REJECTED)
    dropped = drop_inherited(os.environ, emulated=True)
    if dropped:
        print(f"ignored in the environment, because they belong to another job: {' '.join(dropped)}")
    for each in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(each, lambda number, _: sys.exit(SIGNALLED + number))
    return None


def print_commands(plan: RunPlan, python: str | Path = sys.executable) -> None:
    """Prints what a run would do, as commands of ``python`` that can be copied into a shell."""
    print(f"output\n  {plan.output}\ncheckpoint\n  {plan.checkpoint}\nenvironment")
    for name, value in sorted(plan.environment().items()):
        print(f"  export {name}={shlex.quote(value)}")
    print("commands")
    commands = [] if plan.checkpoint.exists() else [plan.checkpoint_command()]
    for command in (*commands, plan.data_command(), plan.run_command()):
        print("  " + shlex.join([str(python), *command[1:]]))


def in_private_folder(carry_out: Callable[["SignalFlag", float, Path], dict[str, Any]]) -> dict[str, Any]:
    """Carries out a rehearsal with emulated dies of its own.

    Args:
        carry_out: is given the signals that arrive, the Unix time at which the user started the command, and a folder
            for temporary files that is removed in the end; it returns the summary.
    """
    import psutil

    from post_training.processes.command import SignalFlag
    from rehearsal.emulated_dies import remove_emulated_dies
    from verl_patches.trainer.isolated_ray import private_folder

    with SignalFlag() as signals:
        # rehearse.sh is this same process, so its start is the start of the user's command.
        launched = psutil.Process().create_time()
        with private_folder("rehearsal", on_removal=remove_emulated_dies) as folder:
            return carry_out(signals, launched, folder)


def status_of(run: Callable[[], None], output: Path) -> int:
    """Call ``run``, which writes ``output``, and return the exit status; a failure is printed as one sentence."""
    from post_training.data import DataError
    from post_training.disks import FULL, describe_full_disk
    from post_training.processes.command import Interrupted
    from post_training.report import ReportError
    from post_training.run_lock import FolderInUse
    from rehearsal.preflight import PreflightError
    from rehearsal.stages import RunFailed
    from verl_patches.trainer.isolated_ray import FolderError

    try:
        run()
    except (PreflightError, DataError, FolderError, FolderInUse) as error:
        return fail(str(error), REJECTED)
    except ReportError as error:
        return fail(str(error), FAILED)
    except OSError as error:
        if error.errno not in FULL:
            raise
        return fail(describe_full_disk([error.filename or output, output]) or str(error), FAILED)
    except RunFailed as error:
        return fail(f"{error}\nWhole log: {error.log}", FAILED)
    except Interrupted as interrupted:
        return fail(
            f"{interrupted} ended the run; everything it started has been stopped.", SIGNALLED + interrupted.number
        )
    return DONE


def fail(sentence: str, status: int) -> int:
    """Prints why a command fails; returns ``status``."""
    print(f"error: {sentence}", file=sys.stderr)
    return status
