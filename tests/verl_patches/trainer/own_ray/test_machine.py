"""A Ray of our own answers its driver however long its workers take."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Which workers there are when Ray, ours or as it comes, has answered the driver, which has asked for none yet.
PROGRAM = """
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
    ray.shutdown()
print(sum(line.startswith("ray::") for line in processes))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("way", "workers"), [("ours", 0), ("as it comes", 2)])
def test_the_driver_waits_for_no_worker(way, workers):
    line = [sys.executable, "-c", PROGRAM, way]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.splitlines()[-1]) == workers
