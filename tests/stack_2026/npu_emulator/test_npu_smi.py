"""The emulator's npu-smi prints the published formats, and vLLM-Ascend and verl can read it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import npu_emulator

COMMAND = Path(npu_emulator.__file__).parent / "toolkit" / "bin" / "npu-smi"
SAMPLES = Path(__file__).parents[2] / "scripts" / "npu_smi"
A2, A3 = "Ascend910B3", "Ascend910_9391"
READERS = """
import json
import torch_npu
from verl.utils.device import get_npu_versions, is_support_ipc
from vllm_ascend.cpu_binding import DeviceInfo
print(json.dumps([DeviceInfo.get_npu_map_info(), get_npu_versions()[1:], is_support_ipc()]))
"""
BOTH = pytest.mark.parametrize(("chip", "sample"), [(A2, "a2"), (A3, "a3")], ids=["a2", "a3"])


def ask(*arguments: str, chip: str, devices: int = 4) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NPU_EMULATOR_CHIP": chip, "NPU_EMULATOR_DEVICES": str(devices)}
    return subprocess.run([COMMAND, *arguments], env=environment, capture_output=True, text=True)


def published(name: str) -> list[str]:
    return (SAMPLES / f"{name}.txt").read_text().splitlines()


@BOTH
def test_mapping_has_the_published_form(chip, sample):
    given, devices = published(f"{sample}_mapping"), 4 if chip == A2 else 16
    found = ask("info", "-m", chip=chip, devices=devices).stdout.splitlines()
    assert found[0] == given[0]
    strip = [[word for word in line.split() if word.isdecimal() or word in "-Mcu"] for line in given[1:]]
    assert [[word for word in line.split() if word.isdecimal() or word in "-Mcu"] for line in found[1:]] == strip


@BOTH
def test_table_has_the_published_frame_and_headings(chip, sample):
    given, found = published(f"{sample}_info"), ask("info", chip=chip).stdout.splitlines()
    assert found[2:6] == given[2:6] and {len(line) for line in found} == {len(given[0])}
    headings = [line for line in given if "Process id" in line]
    assert [line for line in found if "Process id" in line] == headings


def test_chip_of_the_release_is_the_default():
    assert ask("info", chip="").stdout == ask("info", chip=A2).stdout != ask("info", chip=A3).stdout


@pytest.mark.parametrize(("chip", "card"), [(A2, 4), (A3, 2)])
def test_card_that_is_not_there_is_an_error(chip, card):
    assert ask("info", "-t", "board", "-i", str(card), chip=chip).returncode == 1
    assert ask("info", "-t", "health", "-i", str(card - 1), chip=chip).stdout.endswith(": OK\n")


@pytest.mark.parametrize(
    ("chip", "mapping"),
    [
        (A2, {str(card): {"0": str(card)} for card in range(4)}),
        (A3, {"0": {"0": "0", "1": "1"}, "1": {"0": "2", "1": "3"}}),
    ],
    ids=["a2", "a3"],
)
def test_upstream_reads_numbers_and_versions(chip, mapping):
    environment = os.environ | {"NPU_EMULATOR_CHIP": chip, "NPU_EMULATOR_DEVICES": "4"}
    done = subprocess.run([sys.executable, "-c", READERS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [mapping, ["25.5.0", "9.1.0"], True]
