"""Forked workers draw different random Ray IDs, although the template has decorated an actor."""

import shlex
import subprocess

import pytest

from rehearsal.prefork import start_template

ACTOR = "import ray\n\n@ray.remote\nclass Actor: pass\n"
DRAW = "from ray import JobID, TaskID; print(TaskID.for_fake_task(JobID.from_int(1)).hex())"


@pytest.mark.parametrize(("modules", "different"), [(["rehearsal.prefork.ray_ids"], 2), ([], 1)])
def test_forks_draw_different_ids(tmp_path, monkeypatch, modules, different):
    (tmp_path / "has_actor.py").write_text(ACTOR)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    running = start_template([*modules, "has_actor"])
    command = [*shlex.split(running.py_executable), "-c", DRAW]
    drawn = [subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout for _ in range(2)]
    running.close()
    assert len(set(drawn)) == different and all(drawn)
