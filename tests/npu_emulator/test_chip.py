"""The chip: an Atlas A3 by default, another by a setting, as CANN, torch_npu and vllm-ascend tell them apart."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import acl, torch, torch_npu
from vllm_ascend.soc_info import NPUSocInfo
properties = torch.npu.get_device_properties(0)
print(acl.get_soc_name(), torch.npu.get_device_name(0), properties.name, torch_npu.npu.get_soc_version(),
      torch_npu._C._npu_get_soc_version(), NPUSocInfo().is_a3)
"""


def run(program: str, chip: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NPU_EMULATOR_CHIP": chip}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("setting", "name", "number", "is_a3"),
    [("", "Ascend910_9391", "250", "True"), ("Ascend910B3", "Ascend910B3", "223", "False")],
)
def test_everybody_sees_the_same_chip(setting, name, number, is_a3):
    ended = run(PROGRAM, setting)
    assert ended.stdout.split()[-6:] == [name, name, name, number, number, is_a3], ended.stderr


def test_a_chip_that_torch_npu_does_not_know_rejected_by_name():
    ended = run("import torch; torch.ones(1, device='npu')", "Ascend910C")
    assert ended.returncode == 1 and "Unsupported soc version: Ascend910C" in ended.stderr
