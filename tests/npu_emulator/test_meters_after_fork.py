"""A process that was forked after torch_npu was imported writes its own meters."""

import json
import os
import subprocess
import sys

import pytest

FORKED = """
import os, sys
import torch, torch_npu
if os.fork() == 0:
    torch.ones(8, device="npu").add_(1)
    sys.exit(0)
os.wait()
"""

STARTED_BY_MULTIPROCESSING = """
import multiprocessing
import torch, torch_npu
def use():
    torch.ones(8, device="npu").add_(1)
    torch.npu.synchronize()
child = multiprocessing.get_context("fork").Process(target=use)
child.start()
child.join()
"""

FORKED_WHILE_READ = """
import os, threading
import torch, torch_npu
from npu_emulator import counters

counted = torch.rand(4, device="npu")
for function in (torch.abs, torch.cos, torch.exp, torch.log, torch.neg, torch.sin, torch.sqrt, torch.tanh):
    function(counted)
torch.npu.synchronize()
# On one core a thread is often stopped while it holds the lock.
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
read = counters.library().npu_emulator_cann_operator_calls

def keep_reading():
    while True:
        read()

for _ in range(4):
    threading.Thread(target=keep_reading, daemon=True).start()
for _ in range(30):
    child = os.fork()
    if child == 0:
        read()
        os._exit(0)
    os.waitpid(child, 0)
os._exit(0)
"""


@pytest.mark.parametrize("program", [FORKED, STARTED_BY_MULTIPROCESSING])
def test_forked_process_writes_and_its_idle_parent_does_not(tmp_path, program):
    environment = {**os.environ, "NPU_EMULATOR_METERS": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    (written,) = tmp_path.glob("*.json")
    assert json.loads(written.read_text())["operators"]["aclnnInplaceAdds"] == {"calls": 1}


def test_process_forked_while_meters_are_read_can_read_its_own():
    """torch_npu's profiler forks a process to parse its files, which once waited forever for a lock of its parent."""
    subprocess.run([sys.executable, "-c", FORKED_WHILE_READ], env=os.environ, check=True, timeout=300)
