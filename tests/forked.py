"""Starts Python programs as forks of a process that has imported what they import.

A program of tests that imports PyTorch and torch_npu takes seconds of a processor before it does anything, and one
that imports verl and Megatron three times as many. `start` gives a `subprocess.Popen` as for a new interpreter: its
process asks a template to fork, hands its output, folder and environment over, and stays until the fork has ended.

Where processes share the tests they share the templates too, which the process that began the tests has started. A
template imports when it is first asked, and ends with the process that started it.

A library that reads the environment when it is imported has read the template's. A program for which such a variable
has another value gets its own interpreter, and so should one whose start is under test.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from npu_emulator import engine
from rehearsal.prefork import start_template
from rehearsal.prefork.launch import NPU_DRIVER

# Modules in the order in which a template imports them; the overlay sees every later import.
PYTORCH = ("torch", "torch_npu")
MEGATRON = ("verl_patches.prelude_patch", "torch", "verl.workers.megatron_workers", "vllm")
FSDP = ("verl_patches.prelude_patch", "torch", "verl.workers.fsdp_workers")
# Read by PyTorch, torch_npu or the emulator when they are imported.
READ_AT_IMPORT = (
    "LD_PRELOAD", "NPU_EMULATOR_DEFERRED_COLLECTIVES", "NPU_EMULATOR_METERS", "NPU_EMULATOR_STREAM_SEED",
    "OMP_NUM_THREADS", "PYTORCH_NPU_ALLOC_CONF", "TORCH_DEVICE_BACKEND_AUTOLOAD",
)  # fmt: skip
SHARED = "TEMPLATES_OF_TESTS"
"""The variable that names the shared templates, by JSON: whose they are, and of each what it has imported, what it read
then, and its client."""
# Tests run tests of copies of the tree, and with other interpreters: what these import is not in our templates.
_OWNER = [str(Path(__file__).resolve().parents[1]), sys.executable]
SPENT = "SECONDS_SPENT_BY_FORKS"
"""The variable that names the file to which a fork writes what it cost: it is no child of the process that measures."""
_PROGRAM = """
import os, runpy, warnings
os.setsid()
warnings.simplefilter("ignore")
try:
    runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
finally:
    if {spent!r} in os.environ:
        with open(os.environ[{spent!r}], "a") as file:
            file.write(str(sum(os.times()[:4])) + "\\n")
"""


def _read(environment: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(environment.get(name) for name in READ_AT_IMPORT)


def _start_template(imported: Sequence[str]) -> str:
    """Start a template with this process's environment; returns the command line of its client."""
    template = start_template(imported)
    atexit.register(template.close)
    return template.py_executable


_own_template = functools.cache(lambda imported, read: _start_template(imported))


def share_templates(without: Sequence[str]) -> None:
    """Start templates for the processes that this one will start: every kind, and PyTorch's without some variables."""
    if NPU_DRIVER.exists():
        return
    kinds = [(imported, _read(os.environ), _start_template(imported)) for imported in (PYTORCH, MEGATRON, FSDP)]
    with mock.patch.dict(os.environ):
        for name in without:
            os.environ.pop(name, None)
        kinds.append((PYTORCH, _read(os.environ), _start_template(PYTORCH)))
    os.environ[SHARED] = json.dumps([_OWNER, kinds])


def _client(imported: tuple[str, ...], environment: Mapping[str, str]) -> str | None:
    """The command line that asks for a fork; None where there is no template for this environment."""
    read = _read(environment)
    owner, kinds = json.loads(os.environ.get(SHARED, "[[], []]"))
    for modules, read_then, client in kinds:
        if (owner, tuple(modules), tuple(read_then)) == (_OWNER, imported, read):
            return client
    return _own_template(imported, read) if read == _read(os.environ) and not NPU_DRIVER.exists() else None


def start(
    imported: tuple[str, ...],
    module: str,
    *arguments: object,
    environment: Mapping[str, str],
    python: str | Path = sys.executable,
    **options: Any,
) -> subprocess.Popen[str]:
    """A process that runs `module` with `arguments`, as `python -W ignore -m` does, in a session of its own.

    It is forked from a template that has imported the modules `imported`; without any, with another `python`, or where
    no template has read this `environment`, it is a new interpreter. `options` are those of Popen. A fork gets SIGTERM
    where the process ends before it.
    """
    client = _client(imported, environment) if imported and python == sys.executable else None
    if client is None:
        command, options["start_new_session"] = [python, "-W", "ignore", "-m", module], True
    else:
        command = [*shlex.split(client), "-c", _PROGRAM.format(module=module, spent=SPENT)]
        # Whoever imports torch_npu finds CANN's tools; the template's PATH is not the fork's.
        tools = engine.FOLDER / "toolkit" / "bin"
        environment = {**environment, "PATH": f"{tools}{os.pathsep}{environment.get('PATH', '')}"}
    return subprocess.Popen([*command, *map(str, arguments)], env=environment, text=True, **options)
