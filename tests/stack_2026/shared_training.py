"""Rehearsals of the tests, which share one import of the stack: their training is forked from a template.

`python -m tests.stack_2026.shared_training` takes the arguments of `python -m rehearsal.stack_2026`. Two steps of a
small model would spend 40 % of their CPU time on imports.
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
from rehearsal.stack_2026.plan import Options, VerlPlan
from rehearsal.stack_2026.training import KEY, MEGATRON, MODULES, drive
from tests.shared_templates import await_workers, client_of, share, started_with

_DRIVER = "from tests.stack_2026.shared_training import drive_and_wait; drive_and_wait()"
# Options with which rehearsals import in different environments.
_DIFFERENT = (Options(), Options(rollout_dies=1, dies=2, weights="alltoallv"))
_run_command = VerlPlan.run_command


def share_templates() -> None:
    """Start a template for each environment that rehearsals import with."""
    with mock.patch.dict(os.environ, started_with({}), clear=True):
        variables = [os.environ | VerlPlan(options, Path(), Path()).environment() for options in _DIFFERENT]
    for each in variables:
        share((*MODULES, *MEGATRON), each)


def run_command(plan: VerlPlan) -> list[str]:
    """Return the command of a plan's training, as a fork if a template suits it."""
    command = _run_command(plan)
    # MindSpeed has to be imported before Megatron-core.
    own = None if plan.options.backend == "mindspeed" else {**os.environ, **plan.environment()}
    client = client_of((*MODULES, *MEGATRON), own) if own else None
    if client is None:
        return command
    _, _, _, *arguments = command
    return [*shlex.split(client), "-c", _DRIVER, *arguments, f"{KEY}={quoted(client)}"]


def drive_and_wait() -> None:
    """Run verl's entry point, and exit after its Ray's workers."""
    try:
        drive()
    finally:
        await_workers()


if __name__ == "__main__":
    VerlPlan.run_command = run_command  # type: ignore[method-assign]
    escape_output(standard_output=False)
    sys.exit(program.main())
