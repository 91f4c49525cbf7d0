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


@pytest.mark.parametrize("program", [FORKED, STARTED_BY_MULTIPROCESSING])
def test_forked_process_writes_and_its_idle_parent_does_not(tmp_path, program):
    environment = {**os.environ, "NPU_EMULATOR_METERS": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    (written,) = tmp_path.glob("*.json")
    assert json.loads(written.read_text())["operators"]["aclnnInplaceAdds"] == {"calls": 1}
