"""A program for two ranks that records two steps of the second rank; test_profile.py reads the recordings."""

import os
from pathlib import Path

import torch
import torch_npu  # noqa: F401

from verl_patches.features.profile.feature import ProfileSettings
from verl_patches.features.profile.recorder import Recorder

STEPS = (1, 5)


def multiply() -> None:
    torch.ones(4, 4, device="npu") @ torch.ones(4, 4, device="npu")


def main(folder: Path) -> None:
    """Multiply once in each step, and often between two steps."""
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    chosen, recorder = ProfileSettings(steps=STEPS, ranks=(1,)), Recorder()
    for step in STEPS:
        recorder.turn_to(step, rank, chosen, folder)
        multiply()
        recorder.turn_to(None, rank, chosen, folder)
        for _ in range(300):  # still queued when the next recording begins
            multiply()
