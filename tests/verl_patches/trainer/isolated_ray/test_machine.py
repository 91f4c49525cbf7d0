"""The isolated Ray answers its driver without waiting for any worker or helper."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from omegaconf import OmegaConf

from verl_patches.features.measure.run_files import read_faults
from verl_patches.features.training_checkpoint.run_records import take_back_steps
from verl_patches.trainer import main_ppo
from verl_patches.trainer.isolated_ray import IsolatedRay, machine

# Prints how many workers, and how many monitors and API servers, exist once Ray, isolated or plain, has answered a
# driver that requested no worker, and the niceness of a worker that is requested then.
PROGRAM = """
import os
import sys
import psutil
from verl_patches.trainer.isolated_ray import isolated_ray
with isolated_ray() as own:
    import ray
    if sys.argv[1] == "ours":
        own.start(num_cpus=2)
    else:
        ray.init(address="local", num_cpus=2, include_dashboard=False, _temp_dir=str(own.folder / "r"))
    processes = [" ".join(each.cmdline()) for each in psutil.Process().children(recursive=True)]
    niceness = ray.get(ray.remote(lambda: os.nice(0)).remote())
    ray.shutdown()
# A worker is named ray:: once it has begun; the node's own process is told how to start one.
begins = [line for line in processes if "default_worker.py" in line and "--python_worker_command" not in line]
workers = len(begins) + sum(line.startswith("ray::") for line in processes)
helpers = sum("/_private/monitor.py" in line or "/dashboard.py" in line for line in processes)
print(workers, helpers, niceness - os.nice(0))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("way", "found"), [("ours", [0, 0, 0]), ("as it comes", [2, 2, 15])])
def test_the_driver_waits_for_no_worker_and_no_helper_and_workers_for_nobody(way, found):
    line = [sys.executable, "-c", PROGRAM, way]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [int(word) for word in done.stdout.splitlines()[-1].split()] == found


FAILS = """
from verl_patches.trainer.isolated_ray import isolated_ray
with isolated_ray() as own:
    own.start(num_cpus=1)
    raise ValueError("of the driver")
"""


@pytest.mark.slow
def test_an_error_that_ends_the_driver_is_shown_without_ray():
    """Plain Ray would wait a minute for its server, which has ended, and then end the process itself."""
    done = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "GCS" not in done.stderr, done.stderr[-3000:]
    assert done.stderr.splitlines()[-1] == "ValueError: of the driver"


@pytest.fixture
def server():
    """Start a process that stands for Ray's server."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_end_of_rays_server_reported_once(tmp_path, server, monkeypatch):
    """The end is reported during the run, and not again when the run ends."""
    monkeypatch.setattr(machine, "_LOOK_S", 0.01)
    ray, said = IsolatedRay(tmp_path, {"gcs_server": server.pid}), []
    reported = threading.Event()
    with ray.reporting_end(lambda clause: (said.append(clause), reported.set())):
        server.kill()
        server.wait()
        assert reported.wait(60)
    assert said == ["Ray's process gcs_server ended during the run, so the log lacks what workers printed since"]


def test_end_of_rays_server_in_the_last_moment_reported(tmp_path, server):
    ray, said = IsolatedRay(tmp_path, {"raylet": os.getpid(), "gcs_server": server.pid}), []
    with ray.reporting_end(said.append):
        server.kill()
        server.wait()
    assert len(said) == 1 and "gcs_server" in said[0] and "raylet" not in said[0]


def test_ray_that_runs_is_not_reported(tmp_path, server):
    said = []
    with IsolatedRay(tmp_path, {"gcs_server": server.pid}).reporting_end(said.append):
        pass
    assert said == []


def test_fault_of_ended_ray_is_taken_back_with_its_step(tmp_path):
    """The fault belongs to the step in progress, so a run that resumes from before that step is not blamed for it."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "metrics": {}}\n')
    config = OmegaConf.create({"actor_rollout_ref": {"overlay": {"measure": {"output_dir": str(tmp_path)}}}})
    main_ppo._report_ray_end(config, "Ray's process gcs_server ended during the run")
    (fault,) = read_faults(tmp_path)
    assert (fault["kind"], fault["step"]) == ("ray_ended", 2)
    take_back_steps(str(tmp_path), 1)
    assert read_faults(tmp_path) == []
