"""Rehearsals of the tests, which share one import of the stack: their training is forked from a template.

`python -m tests.stack_2026.shared_training` takes the arguments of `python -m rehearsal.stack_2026`. Two steps of a
small model would spend 40 % of their CPU time on imports. The training gets processes of its own if it would import
other modules than the template, or with other variables.
"""

from __future__ import annotations

import atexit
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

from post_training.overrides import quoted
from post_training.processes.descendants import wait_until
from post_training.terminal import escape_output
from rehearsal.plan import ROOT
from rehearsal.prefork import start_template
from rehearsal.stack_2026 import __main__ as program
from rehearsal.stack_2026.plan import Options, Plan
from rehearsal.stack_2026.training import KEY, MEGATRON, MODULES, drive
from tests import forked

SHARED = "TEMPLATES_OF_REHEARSALS"
"""Environment variable that lists the templates as JSON: the environment each imports with, and its client."""
# Variables that no import reads: those of a run, and the size of the terminal, which only test processes have.
_NOT_READ_AT_IMPORT = {
    "ASCEND_VISIBLE_DEVICES", "NPU_EMULATOR_CAPACITY_MB", "NPU_EMULATOR_DEVICES", "NPU_EMULATOR_METERS",
    "NPU_EMULATOR_NODE", "NPU_EMULATOR_STRICT", "TMPDIR", "VERL_FILE_LOGGER_PATH", "COLUMNS", "LINES",
}  # fmt: skip
_TEST_PREFIXES = ("PYTEST_", "TEMPLATES_OF_", "SECONDS_SPENT_BY_")
_DRIVER = "from tests.stack_2026.shared_training import drive_and_wait; drive_and_wait()"
# Seconds that Ray's workers have to end after the driver.
_GRACE_S = 10.0
_run_command = Plan.run_command


def started_with(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which tests start a rehearsal, with the templates that `environment` lists."""
    own = {**forked.STARTED, "PYTHONPATH": str(ROOT)}
    if SHARED in environment:
        own[SHARED] = environment[SHARED]
    for name in ("NPU_EMULATOR_STRICT", "NPU_EMULATOR_NODE"):  # the tests' value; the rehearsal sets its own
        own.pop(name, None)
    return own


def share_templates() -> None:
    """Start a template for each environment that rehearsals import with; they end with this process."""
    folder = Path(tempfile.mkdtemp(prefix="templates-"))
    atexit.register(shutil.rmtree, folder)
    options = (Options(), Options(rollout_dies=1, dies=2, weights="alltoallv"))
    described = []
    for number, each in enumerate(options):
        log = folder / f"{number}.log"
        with mock.patch.dict(os.environ, started_with({}), clear=True), log.open("wb") as output:
            os.environ |= Plan(each, folder, folder).environment()
            template = start_template((*MODULES, *MEGATRON), output)
            described.append((_variables_at_import(os.environ), template.py_executable))
        atexit.register(template.close)
    os.environ[SHARED] = json.dumps(described)


def _variables_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an import may read."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _NOT_READ_AT_IMPORT and not name.startswith(_TEST_PREFIXES)
    }


def _client(plan: Plan) -> str | None:
    """Return the command line that asks for a fork; None if no template imports what the plan's training would."""
    if plan.options.backend == "mindspeed":  # it has to be imported before Megatron-core
        return None
    own = _variables_at_import({**os.environ, **plan.environment()})
    for environment, client in json.loads(os.environ.get(SHARED, "[]")):
        if environment == own:
            return client
    return None


def run_command(plan: Plan) -> list[str]:
    """Return the command of a plan's training, as a fork if a template suits it."""
    command, client = _run_command(plan), _client(plan)
    if client is None:
        return command
    _, _, _, *arguments = command
    return [*shlex.split(client), "-c", _DRIVER, *arguments, f"{KEY}={quoted(client)}"]


def drive_and_wait() -> None:
    """Run verl's entry point, and exit after its Ray's workers, so that their last meters are written."""
    try:
        drive()
    finally:
        wait_until(lambda: not _workers(os.environ["TMPDIR"]), _GRACE_S)


def _workers(folder: str) -> list[int]:
    """Return the other forks of this process's template whose output goes to files in `folder`."""
    forks = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
    found = []
    for process in map(int, forks):
        try:
            output = os.readlink(f"/proc/{process}/fd/1")
        except OSError:  # it has ended
            continue
        if process != os.getpid() and output.startswith(folder):
            found.append(process)
    return found


if __name__ == "__main__":
    Plan.run_command = run_command  # type: ignore[method-assign]
    escape_output(standard_output=False)
    sys.exit(program.main())
