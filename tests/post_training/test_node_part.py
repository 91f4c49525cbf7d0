"""A launcher's description of a node's part is read back exactly."""

import subprocess
import sys
from pathlib import Path

import pytest

from post_training.node_part import NodePart

ROOT = Path(__file__).resolve().parents[2]


def test_described_part_is_read_back_word_by_word():
    command = ("python3", "-m", "verl_patches.trainer.main_ppo", "data.train_files=['/d/a b.parquet']", "a='x=y'", "--")
    words = [
        "head",
        "NPU_EMULATOR_CAPACITY_MB=1024",
        "HCCL_IF_BASE_PORT=61000",
        "EMPTY=",
        "FLAGS=--a=1 --b=",
        "--",
        *command,
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "post_training.node_part", *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    part = NodePart.parse(f"ignored in the environment: RANK\n{ran.stdout}")
    assert (part.role, part.command, part.emulated_mb) == ("head", command, 1024)
    assert part.environment == {
        "NPU_EMULATOR_CAPACITY_MB": "1024", "HCCL_IF_BASE_PORT": "61000", "EMPTY": "", "FLAGS": "--a=1 --b=",
    }  # fmt: skip
    assert NodePart("worker", (), {}).emulated_mb is None


@pytest.mark.parametrize("text", ["", "node 10.0.0.1 on eth0: head of 2 nodes", '{"role": "head"}', "[]"])
def test_output_that_describes_no_part_rejected(text):
    with pytest.raises(ValueError):
        NodePart.parse(text)
