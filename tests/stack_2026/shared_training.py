"""Rehearsals of the tests, which share one import of the stack: their training is forked from a template.

`python -m tests.stack_2026.shared_training` takes the arguments of `python -m rehearsal.stack_2026`. Two steps of a
small model would spend 40 % of their CPU time on imports. Most models have a short warm start.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from unittest import mock

from post_training.overrides import quoted
from post_training.terminal import escape_output
from rehearsal.stack_2026 import __main__ as program
from rehearsal.stack_2026 import plan as plan_module
from rehearsal.stack_2026.plan import Options, Rehearsal2026Plan
from rehearsal.stack_2026.training import KEY, MEGATRON, MODULES, drive
from rehearsal.tiny_model.architecture import reads_images
from tests.shared_templates import await_workers, client_of, share, started_with

_DRIVER = "from tests.stack_2026.shared_training import drive_and_wait; drive_and_wait()"
# Options with which rehearsals import in different environments.
_DIFFERENT = (Options(), Options(rollout_dies=1, dies=2, weights="alltoallv"))
_run_command, _checkpoint_command = Rehearsal2026Plan.run_command, Rehearsal2026Plan.checkpoint_command
_checkpoint_key = plan_module.checkpoint_key


def share_templates() -> None:
    """Start a template for each environment that rehearsals import with."""
    with mock.patch.dict(os.environ, started_with({}), clear=True):
        variables = [os.environ | Rehearsal2026Plan(options, Path(), Path()).environment() for options in _DIFFERENT]
    for each in variables:
        share((*MODULES, *MEGATRON), each)


def run_command(plan: Rehearsal2026Plan) -> list[str]:
    """Return the command of a plan's training, as a fork if a template suits it."""
    command = _run_command(plan)
    # MindSpeed has to be imported before Megatron-core.
    own = None if plan.options.backend == "mindspeed" else {**os.environ, **plan.environment()}
    client = client_of((*MODULES, *MEGATRON), own) if own else None
    if client is None:
        return command
    _, _, _, *arguments = command
    return [*shlex.split(client), "-c", _DRIVER, *arguments, f"{KEY}={quoted(client)}"]


def has_short_warm_start(options: Options) -> bool:
    """Return whether the model is of a family without a warm start of its own, as those with images or a tool have."""
    return not (options.tool or reads_images(options.model))


def checkpoint_command(plan: Rehearsal2026Plan) -> list[str]:
    """Return the command that makes the tiny checkpoint."""
    python, script, *arguments = _checkpoint_command(plan)
    short = has_short_warm_start(plan.options)
    return [python, *(["-m", "tests.stack_2026.short_warm_start"] if short else [script]), *arguments]


def checkpoint_key(options: Options) -> str:
    """Return the name of the tiny checkpoint's folder, which is another one than that of a rehearsal."""
    return _checkpoint_key(options) + ("-short" if has_short_warm_start(options) else "")


def drive_and_wait() -> None:
    """Run verl's entry point, and exit after its Ray's workers."""
    try:
        drive()
    finally:
        await_workers()


if __name__ == "__main__":
    Rehearsal2026Plan.run_command = run_command  # type: ignore[method-assign]
    Rehearsal2026Plan.checkpoint_command = checkpoint_command  # type: ignore[method-assign]
    plan_module.checkpoint_key = checkpoint_key
    escape_output(standard_output=False)
    sys.exit(program.main())
