"""The chip: an Atlas A3 by default, another by a setting, as CANN, torch_npu and vllm-ascend tell them apart."""

import os
import subprocess
import sys

import pytest

from npu_emulator.chip import SOC_VERSIONS, chip_named

PROGRAM = """
import acl, torch, torch_npu
from vllm_ascend.soc_info import NPUSocInfo
properties = torch.npu.get_device_properties(0)
print(acl.get_soc_name(), torch.npu.get_device_name(0), properties.name, torch_npu.npu.get_soc_version(),
      torch_npu._C._npu_get_soc_version(), NPUSocInfo().is_a3)
"""


@pytest.mark.parametrize(
    ("setting", "name", "number", "is_a3"),
    [("", "Ascend910_9391", "250", "True"), ("Ascend910B3", "Ascend910B3", "223", "False")],
)
def test_everybody_sees_the_same_chip(setting, name, number, is_a3):
    environment = os.environ | {"NPU_EMULATOR_CHIP": setting}
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert ended.stdout.split()[-6:] == [name, name, name, number, number, is_a3], ended.stderr


def test_numbers_are_those_of_torch_npu():
    """SocVersion of torch_npu 2.5.1: 220 to 225 are an A2's chips, 250 to 255 an A3's."""
    assert sorted(SOC_VERSIONS.values()) == [*range(220, 226), *range(250, 256)]
    assert chip_named("Ascend910B1").soc_version == 220
    assert chip_named("Ascend910_9362").soc_version == 255


def test_an_unknown_chip_is_named():
    with pytest.raises(RuntimeError, match="NPU_EMULATOR_CHIP must be one of Ascend910B1, .* not 'Ascend310P'"):
        chip_named("Ascend310P")
