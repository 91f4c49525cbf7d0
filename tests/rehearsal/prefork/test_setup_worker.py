"""A worker gets the command line and the environment that Ray's own setup_worker.py gives it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants

from rehearsal.prefork import launch, set_up_workers_quickly

OURS = Path(launch.__file__).with_name("setup_worker.py")
WORKERS = Path(ray.__file__).parent / "_private" / "workers"
SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
OF_A_SHELL = {"_", "SHLVL", "PWD", "OLDPWD"}


@pytest.fixture
def show(tmp_path):
    """Return a py_executable that prints its arguments and its environment."""
    (tmp_path / "show.py").write_text(SHOW)
    return f"{sys.executable} -I -S {tmp_path}/show.py -first"


def started_by(program, context, language="PYTHON"):
    arguments = [
        WORKERS / "default_worker.py", "--node-ip-address=127.0.0.1", "--name=a b'$HOME", f"--language={language}",
        f"--serialized-runtime-env-context={json.dumps(context)}",
    ]  # fmt: skip
    environment = os.environ | {"GIVEN": "one", "UNCHANGED": "$GIVEN"}
    ended = subprocess.run([sys.executable, program, *arguments], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    shown, environment = json.loads(ended.stdout.splitlines()[-1])
    return shown, {name: value for name, value in environment.items() if name not in OF_A_SHELL}


@pytest.mark.parametrize(
    ("more", "by_ray"),
    [
        ({}, False),
        ({"env_vars": {"GIVEN": "${GIVEN} $GIVEN ${NOT_GIVEN}two", "NEW": "a 'b'"}}, False),
        ({"command_prefix": ["export", "PREFIX=1", "&&"]}, True),
        ({"override_worker_entrypoint": "/elsewhere/worker.py"}, True),
    ],
)
def test_workers_start_as_by_rays_program(show, tmp_path, more, by_ray):
    empty = {"command_prefix": [], "env_vars": {}, "override_worker_entrypoint": None, "java_jars": []}
    context = empty | {"py_executable": show} | more
    assert started_by(OURS, context) == started_by(WORKERS / "setup_worker.py", context)
    # Without Ray's program, those alone fail that are left to it.
    arguments = [tmp_path / "absent" / "default_worker.py", "--language=PYTHON"]
    arguments.append(f"--serialized-runtime-env-context={json.dumps(context)}")
    alone = subprocess.run([sys.executable, OURS, *arguments], capture_output=True, text=True)
    assert (alone.returncode != 0) == by_ray, alone.stderr


def test_ray_takes_it_for_its_own(monkeypatch):
    monkeypatch.setattr(ray_constants, "SETUP_WORKER_FILENAME", ray_constants.SETUP_WORKER_FILENAME)
    set_up_workers_quickly()
    assert os.path.join(WORKERS, ray_constants.SETUP_WORKER_FILENAME) == str(OURS)
