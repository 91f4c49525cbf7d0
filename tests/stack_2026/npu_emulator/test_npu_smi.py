"""npu-smi of the emulator as vLLM-Ascend, verl and this project's checks read it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import npu_emulator
from scripts.examination.npus import read_health, read_mapping
from scripts.examination.occupied_dies import read_processes

COMMAND = Path(npu_emulator.__file__).parent / "toolkit" / "bin" / "npu-smi"
A2, A3 = "Ascend910B3", "Ascend910_9391"
READERS = """
import torch_npu
from verl.utils.device import get_npu_versions, is_support_ipc
from vllm_ascend.cpu_binding import DeviceInfo
print(DeviceInfo.get_npu_map_info(), *get_npu_versions()[1:], is_support_ipc(), sep="|")
"""


def ask(*arguments: str, chip: str = "", devices: int = 4) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NPU_EMULATOR_CHIP": chip, "NPU_EMULATOR_DEVICES": str(devices)}
    return subprocess.run([COMMAND, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("chip", "cards"), [("", [0, 1, 2, 3]), (A2, [0, 1, 2, 3]), (A3, [0, 0, 1, 1])], ids=["default", "a2", "a3"]
)
def test_chips_are_numbered_as_on_the_machine(chip, cards):
    found = read_mapping(ask("info", "-m", chip=chip).stdout)
    assert [each.npu for each in found] == cards and [each.logic for each in found] == [0, 1, 2, 3]
    table = ask("info", chip=chip).stdout
    assert read_health(table) == {(each.npu, each.chip): "OK" for each in found}
    assert read_processes(table) == []


def test_lines_of_the_table_are_as_wide_as_its_frame():
    for chip in (A2, A3):
        lines = ask("info", chip=chip).stdout.splitlines()
        assert {len(line) for line in lines} == {len(lines[0])}


@pytest.mark.parametrize(("chip", "card"), [(A2, 4), (A3, 2)])
def test_card_that_is_not_there_is_an_error(chip, card):
    assert ask("info", "-t", "board", "-i", str(card), chip=chip).returncode == 1
    assert ask("info", "-t", "health", "-i", str(card - 1), chip=chip).stdout.endswith(": OK\n")


@pytest.mark.parametrize(
    ("chip", "numbers"), [(A2, {"0": "0", "1": "1"}), (A3, {"0": "0", "1": "1"})], ids=["a2", "a3"]
)
def test_upstream_reads_numbers_and_versions(chip, numbers):
    environment = os.environ | {"NPU_EMULATOR_CHIP": chip, "NPU_EMULATOR_DEVICES": "2"}
    done = subprocess.run([sys.executable, "-c", READERS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    mapping, driver, cann, shares = done.stdout.splitlines()[-1].split("|")
    read = {chip for chips in eval(mapping).values() for chip in chips.values() if chip.isdigit()}
    assert read == set(numbers.values())
    assert (driver, cann, shares) == ("25.5.0", "9.1.0", "True")
