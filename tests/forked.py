"""Start Python programs as forks of a template process that has already done their imports.

A test program that imports PyTorch and torch_npu uses seconds of CPU time before it does anything, and one that imports
verl and Megatron three times as much. `start` returns a `subprocess.Popen` as for a new interpreter: that process asks
a template to fork, passes on its output, folder and environment, and stays until the fork has exited.

Test processes that run in parallel share the templates, which the main test process starts. A template does its imports
when it is first asked, and exits with the process that started it.

A library that reads the environment at import has read the template's. A program with another value of such a variable
gets its own interpreter, and so should a program whose startup is under test.
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

# Modules in import order; the overlay comes early enough to see the later imports.
PYTORCH = ("torch", "torch_npu")
MEGATRON = ("verl_patches.prelude_patch", "torch", "verl.workers.megatron_workers", "vllm")
FSDP = ("verl_patches.prelude_patch", "torch", "verl.workers.fsdp_workers")
# Those of the stack 2026: verl's engines, which import Megatron too.
ENGINES_2026 = ("torch", "torch_npu", "verl.workers.engine")
# Variables that PyTorch, torch_npu or the emulator read at import.
READ_AT_IMPORT = (
    "LD_PRELOAD", "NPU_EMULATOR_DEFERRED_COLLECTIVES", "NPU_EMULATOR_METERS", "NPU_EMULATOR_STREAM_SEED",
    "OMP_NUM_THREADS", "PYTORCH_NPU_ALLOC_CONF", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCHDYNAMO_DISABLE",
    "VERL_USE_EXTERNAL_MODULES",
)  # fmt: skip
STARTED = dict(os.environ)
"""The environment before any test: what tests import changes it."""
SHARED = "TEMPLATES_OF_TESTS"
"""Environment variable that describes the shared templates as JSON: their owner, and for each its imports, the
environment it read, and its client."""
# Some tests run the tests of a copy of the tree, or use other interpreters; our templates lack their imports.
_OWNER = [str(Path(__file__).resolve().parents[1]), sys.executable]
SPENT = "SECONDS_SPENT_BY_FORKS"
"""Environment variable with the file to which a fork writes its cost, as it is no child of the measuring process."""
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
    """Start a template with this process's environment, and return the command line of its client."""
    template = start_template(imported)
    atexit.register(template.close)
    return template.py_executable


_own_template = functools.cache(lambda imported, read: _start_template(imported))


def share_templates(without: Sequence[str]) -> None:
    """Start templates for our test processes: one of each kind, and PyTorch's also without some variables."""
    if NPU_DRIVER.exists():
        return
    every = (PYTORCH, MEGATRON, FSDP, ENGINES_2026)
    kinds = [(imported, _read(os.environ), _start_template(imported)) for imported in every]
    with mock.patch.dict(os.environ):
        for name in without:
            os.environ.pop(name, None)
        kinds.append((PYTORCH, _read(os.environ), _start_template(PYTORCH)))
    os.environ[SHARED] = json.dumps([_OWNER, kinds])


def _client(imported: tuple[str, ...], environment: Mapping[str, str]) -> str | None:
    """Return the command line that requests a fork, or None without a template for this environment."""
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
    """Start a process that runs `module` with `arguments`, like `python -W ignore -m`, in its own session.

    It is forked from a template that has imported the modules `imported`. Without such modules, with another `python`,
    or without a template for this `environment`, it is a new interpreter. `options` are passed to Popen. A fork gets
    SIGTERM if the process exits before it.
    """
    client = _client(imported, environment) if imported and python == sys.executable else None
    if client is None:
        command, options["start_new_session"] = [python, "-W", "ignore", "-m", module], True
    else:
        command = [*shlex.split(client), "-c", _PROGRAM.format(module=module, spent=SPENT)]
        # Importing torch_npu adds CANN's tools to PATH, but the template's PATH is not the fork's.
        tools = engine.FOLDER / "toolkit" / "bin"
        environment = {**environment, "PATH": f"{tools}{os.pathsep}{environment.get('PATH', '')}"}
    return subprocess.Popen([*command, *map(str, arguments)], env=environment, text=True, **options)
