"""Run a command on emulated dies of its own: ``python -m npu_emulator run [OPTIONS] -- COMMAND ...``.

The command becomes this process, with the settings of the emulator in its environment: its exit code, its signals and
its output are its own, and whatever it starts runs on the same dies.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

NOT_FOUND = 127
DESCRIPTION = """\
Run a command on emulated dies of its own.

The command replaces this process, with the emulator's settings in its
environment. Whatever the command starts runs on the same dies."""
EXAMPLE = """\
Example:
    python -m npu_emulator run --devices 4 -- python train.py"""
TOOLKIT = Path(__file__).parent / "toolkit"
HIDES_DIES = ("ASCEND_RT_VISIBLE_DEVICES", "TORCH_DEVICE_BACKEND_AUTOLOAD")
"""Variables that hide dies of the machine on which they were set, or the device as a whole."""


def help_format(prog: str) -> argparse.HelpFormatter:
    """Return the format of the help texts: at most 80 columns, with the example as it is written."""
    # argparse leaves the last two columns free.
    width = min(shutil.get_terminal_size().columns, 80) - 2
    return argparse.RawDescriptionHelpFormatter(prog, width=width)


def positive(text: str) -> int:
    """Parse a number of dies, or of MiB."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def from_zero(text: str) -> int:
    """Parse a seed."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``run``."""
    parser.add_argument("--devices", type=positive, metavar="N", default=8, help="dies (default: %(default)s)")
    parser.add_argument(
        "--capacity", type=positive, metavar="N", default=4096, help="memory of each die in MiB (default: %(default)s)"
    )
    parser.add_argument(
        "--chip",
        default=(TOOLKIT / "chip").read_text().strip(),
        metavar="NAME",
        help="CANN's name (default: %(default)s)",
    )
    parser.add_argument("--strict", action="store_true", help="reject what the operators' documents forbid")
    parser.add_argument(
        "--deferred", action="store_true", help="complete collectives at wait() only, so that a missing one shows"
    )
    parser.add_argument(
        "--streams",
        type=from_zero,
        metavar="N",
        help="run streams late and in any order that events allow, drawn from this seed",
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="the command and its arguments, after --")


def environment_of(options: argparse.Namespace, given: Mapping[str, str], process: int) -> dict[str, str]:
    """Return the command's environment: `given` with the settings. The process's id gives it dies of its own."""
    settings = {
        "NPU_EMULATOR_DEVICES": str(options.devices),
        "NPU_EMULATOR_CAPACITY_MB": str(options.capacity),
        "NPU_EMULATOR_CHIP": options.chip,
        "NPU_EMULATOR_STRICT": "1" if options.strict else "0",
        "NPU_EMULATOR_DEFERRED_COLLECTIVES": "1" if options.deferred else "0",
        "NPU_EMULATOR_STREAM_SEED": "" if options.streams is None else str(options.streams),
        "NPU_EMULATOR_NODE": f"run-{process}",
    }
    return {name: value for name, value in given.items() if name not in HIDES_DIES} | settings


def run(options: argparse.Namespace) -> int:
    """Become the command. Returns, with the exit code, only if it cannot be started."""
    command: Sequence[str] = options.command
    program = shutil.which(command[0])
    if program is None:
        print(f"error: command not found: {command[0]}. Pass its path.", file=sys.stderr)
        return NOT_FOUND
    sys.stdout.flush()
    os.execve(program, command, environment_of(options, os.environ, os.getpid()))
