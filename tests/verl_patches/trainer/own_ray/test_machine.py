"""A Ray of our own answers its driver however long its workers take."""

from __future__ import annotations

import subprocess
import sys

import pytest

# How many workers there are when Ray, ours or as it comes, has answered the driver, which has asked for none; and the
# niceness of one that is asked for.
PROGRAM = """
import os
import sys
import psutil
from verl_patches.trainer.own_ray import own_ray
with own_ray() as own:
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
print(workers, niceness - os.nice(0))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("way", "workers", "niceness"), [("ours", 0, 0), ("as it comes", 2, 15)])
def test_the_driver_waits_for_no_worker_and_workers_for_nobody(way, workers, niceness):
    line = [sys.executable, "-c", PROGRAM, way]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [int(word) for word in done.stdout.splitlines()[-1].split()] == [workers, niceness]


FAILS = """
from verl_patches.trainer.own_ray import own_ray
with own_ray() as own:
    own.start(num_cpus=1)
    raise ValueError("of the driver")
"""


@pytest.mark.slow
def test_an_error_that_ends_the_driver_is_shown_without_ray():
    """Ray's own way is to wait a minute for its server, which has ended, and then to end the process instead."""
    done = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "GCS" not in done.stderr, done.stderr[-3000:]
    assert done.stderr.splitlines()[-1] == "ValueError: of the driver"
