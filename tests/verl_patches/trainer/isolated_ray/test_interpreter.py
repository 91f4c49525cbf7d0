"""Ray's workers start from a Python whose path has blanks; a path that a raylet cannot use is recognized before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Starts Ray as verl does or plainly, and asks a worker for its Python; a worker that does not start is given up.
PROGRAM = """
import json, sys
import ray
from verl_patches.trainer.isolated_ray import is_found_by_raylets, python_of_workers
environment = {"env_vars": {"A": "b"}, **(python_of_workers() if sys.argv[1] == "ours" else {})}
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[2], runtime_env=environment)
try:
    found = ray.get(ray.remote(lambda: sys.executable).remote(), timeout=float(sys.argv[3]))
except (ray.exceptions.GetTimeoutError, ray.exceptions.RaySystemError):
    found = None
print(json.dumps({"found": found, "foretold": is_found_by_raylets()}))
"""


def asked(python: Path, way: str, seconds: int, folder: Path) -> dict:
    """Return the program's output when Python is started by this path."""
    line = [python, "-c", PROGRAM, way, folder, str(seconds)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def python_below(tmp_path_factory):
    """Return a function that gives the tests' Python by way of a folder with another name."""

    def below(name: str) -> Path:
        link = tmp_path_factory.mktemp("environment") / name
        link.symlink_to(sys.prefix)
        return link / "bin" / "python"

    return below


@pytest.mark.slow
def test_workers_start_with_a_python_whose_path_holds_a_blank(python_below, tmp_path_factory):
    python = python_below("it's of a team")
    folder = tmp_path_factory.mktemp("r")
    assert asked(python, "ours", 120, folder) == {"found": str(python), "foretold": True}
    # The control: plain Ray.
    assert asked(python, "as it comes", 20, folder) == {"found": None, "foretold": True}


@pytest.mark.parametrize(
    ("path", "foretold"),
    [
        ("/opt/venv/bin/python", True),
        ("/data/of a team/bin/python", True),
        ("/data/it's of a team/bin/python", True),
        ("/data/测试,{a}=$b/bin/python", True),
        ("/data/o'neil/bin/python", False),
        ("/data/o'neil'/bin/python", False),
        ("/data/a\\b/bin/python", False),
    ],
)
def test_what_no_raylet_takes_is_known(path, foretold, monkeypatch):
    from verl_patches.trainer.isolated_ray import is_found_by_raylets

    monkeypatch.setattr(sys, "executable", path)
    assert is_found_by_raylets() == foretold
