"""Rehearsals of the tests: their choice of a shared template, and the end of its forks."""

import dataclasses
import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from post_training.processes.descendants import wait_until
from rehearsal.prefork import start_template
from rehearsal.stack_2026.plan import Options, Plan
from rehearsal.stack_2026.training import KEY
from tests.stack_2026 import shared_training
from tests.stack_2026.shared_training import SHARED, run_command

CLIENT = "python client.py /socket"


@pytest.fixture
def plan(tmp_path, monkeypatch) -> Plan:
    """A rehearsal that would import as the only template did."""
    made = Plan(Options(model="qwen3", backend="fsdp2", dies=1), tmp_path / "run", tmp_path / "checkpoint", tmp_path)
    variables = shared_training._variables_at_import({**os.environ, **Plan(Options(), Path(), Path()).environment()})
    monkeypatch.setenv(SHARED, json.dumps([(variables, CLIENT)]))
    return made


def test_training_that_imports_alike_is_forked(plan):
    command, own = run_command(plan), plan.run_command()
    assert command[:4] == [*CLIENT.split(), "-c"] and command[5:] == [*own[3:], f"{KEY}='{CLIENT}'"]


@pytest.mark.parametrize(
    "options", [{"backend": "mindspeed", "model": "qwen3"}, {"rollout_dies": 1, "dies": 2}], ids=["before", "level"]
)
def test_training_that_imports_otherwise_has_its_own_processes(plan, options):
    other = dataclasses.replace(plan, options=dataclasses.replace(plan.options, **options))
    assert run_command(other) == other.run_command()


def test_variable_of_a_test_is_seen_by_imports(plan, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "tests.stack_2026.verl.without_weights")
    assert run_command(plan) == plan.run_command()


def test_forks_of_the_same_run_are_seen_by_their_output(tmp_path):
    """A fork waits for another one that writes to the run's folder, and not for those that write elsewhere."""
    template = start_template(["tests.stack_2026.shared_training"])
    folders = [tmp_path / name for name in ("own", "other")]
    waiting = []
    for folder in folders:
        folder.mkdir()
        with (folder / "log").open("w") as log:
            line = [*shlex.split(template.py_executable), "-c", "print(1, flush=True); input()"]
            waiting.append(subprocess.Popen(line, stdin=subprocess.PIPE, stdout=log, text=True))
    program = (
        "import os, sys\nfrom tests.stack_2026 import shared_training\n"
        "print(len(shared_training._workers(sys.argv[1])))\n"
    )

    def counted() -> str:
        line = [*shlex.split(template.py_executable), "-c", program, str(folders[0])]
        return subprocess.run(line, stdout=subprocess.PIPE, text=True, timeout=600, check=True).stdout

    try:
        assert wait_until(lambda: all((folder / "log").read_text() for folder in folders), 60)
        assert counted() == "1\n"
        waiting[0].communicate("\n")
        assert counted() == "0\n"
    finally:
        for each in waiting:
            each.communicate("\n" if each.poll() is None else None)
        template.close()
