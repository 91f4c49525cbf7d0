"""Tests share templates: which one forks a training, and which of its forks belong to a run."""

import json
import os
import shlex
import subprocess

import pytest

from post_training.processes.descendants import wait_until
from rehearsal.prefork import start_template
from tests.shared_templates import SHARED, client_of, describe

MODULES = ("torch", "ray")


@pytest.mark.parametrize(
    ("modules", "variables", "is_shared"),
    [
        (MODULES, {}, True),
        (MODULES, {"TMPDIR": "/elsewhere", "NPU_EMULATOR_DEVICES": "8"}, True),
        (MODULES, {"VERL_USE_EXTERNAL_MODULES": "another"}, False),
        (("torch",), {}, False),
    ],
)
def test_a_template_forks_what_would_import_the_same(monkeypatch, modules, variables, is_shared):
    monkeypatch.setenv(SHARED, json.dumps([describe(MODULES, dict(os.environ), "client")]))
    assert client_of(modules, os.environ | variables) == ("client" if is_shared else None)


def test_forks_of_the_same_run_are_seen_by_their_output(tmp_path):
    """A fork waits for another one that writes to the run's folder, and not for those that write elsewhere."""
    template = start_template(["tests.shared_templates"])
    folders = [tmp_path / name for name in ("own", "other")]
    waiting = []
    for folder in folders:
        folder.mkdir()
        with (folder / "log").open("w") as log:
            line = [*shlex.split(template.py_executable), "-c", "print(1, flush=True); input()"]
            waiting.append(subprocess.Popen(line, stdin=subprocess.PIPE, stdout=log, text=True))
    program = "import os, sys\nfrom tests import shared_templates\nprint(len(shared_templates._workers(sys.argv[1])))\n"

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
