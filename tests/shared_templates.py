"""Templates of both stacks that tests share, to fork trainings from: they have imported what such a training imports.

The main test process starts them. A training is a fork if a template has the modules and variables that it would import
with, and otherwise has processes of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from unittest import mock

from post_training.processes.descendants import wait_until
from rehearsal.plan import ROOT
from rehearsal.prefork import start_template
from rehearsal.prefork.launch import NPU_DRIVER
from tests import forked

SHARED = "TEMPLATES_OF_TRAININGS"
"""Environment variable that lists the templates as JSON: a digest of what they import, and the client."""
# Variables that no import reads: those of a run, and the size of the terminal, which only test processes have.
_NOT_READ_AT_IMPORT = {
    "ASCEND_VISIBLE_DEVICES", "NPU_EMULATOR_CAPACITY_MB", "NPU_EMULATOR_DEVICES", "NPU_EMULATOR_METERS",
    "NPU_EMULATOR_NODE", "NPU_EMULATOR_STRICT", "TMPDIR", "VERL_FILE_LOGGER_PATH", "MARK_OF_A_RUN", "COLUMNS", "LINES",
}  # fmt: skip
_TEST_PREFIXES = ("PYTEST_", "TEMPLATES_OF_", "SECONDS_SPENT_BY_")
# Seconds that Ray's workers have to end after the driver.
_GRACE_S = 10.0


def started_with(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which tests start a rehearsal, with the templates that `environment` lists."""
    own = {**forked.STARTED, "PYTHONPATH": str(ROOT)}
    if SHARED in environment:
        own[SHARED] = environment[SHARED]
    for name in ("NPU_EMULATOR_STRICT", "NPU_EMULATOR_NODE"):  # the tests' value; the rehearsal sets its own
        own.pop(name, None)
    return own


def share(modules: Sequence[str], environment: Mapping[str, str], **own: str) -> None:
    """Start a template that imports `modules` when it is first asked; it ends with this process.

    It is for trainings that are started in `environment` and add the variables `own` before they import.
    """
    if NPU_DRIVER.exists():
        return
    folder = Path(tempfile.mkdtemp(prefix="templates-"))
    atexit.register(shutil.rmtree, folder)
    with mock.patch.dict(os.environ, {**environment, **own}, clear=True), (folder / "log").open("wb") as output:
        template = start_template(modules, output)
    atexit.register(template.close)
    listed = json.loads(os.environ.get(SHARED, "[]"))
    os.environ[SHARED] = json.dumps([*listed, describe(modules, environment, template.py_executable)])


def describe(modules: Sequence[str], environment: Mapping[str, str], client: str) -> tuple[str, str]:
    """Return the entry of a template in `SHARED`."""
    return _digest_of_import(modules, environment), client


def client_of(modules: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the command line that asks for a fork; None if no template imports the same in the same environment."""
    return dict(json.loads(os.environ.get(SHARED, "[]"))).get(_digest_of_import(modules, environment))


def _digest_of_import(modules: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a digest of the modules and of the variables that an import may read."""
    read = {
        name: value
        for name, value in environment.items()
        if name not in _NOT_READ_AT_IMPORT and not name.startswith(_TEST_PREFIXES)
    }
    return sha256(json.dumps([list(modules), read], sort_keys=True).encode()).hexdigest()


def await_workers() -> None:
    """Wait in a forked driver until its Ray's workers have ended, so that their last meters are written."""
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
