"""A program for two ranks that records one step; test_readers.py opens the result."""

import os
from pathlib import Path

import torch
import torch_npu  # noqa: F401

from verl_patches.features.profile.feature import ProfileSettings
from verl_patches.features.profile.recorder import Recorder


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    chosen, recorder = ProfileSettings(steps=(1,), ranks=(0, 1)), Recorder()
    recorder.turn_to(1, rank, chosen, folder)
    assert (torch.ones(64, 64, device="npu") @ torch.ones(64, 64, device="npu")).sum().item() == 64**3
    recorder.turn_to(None, rank, chosen, folder)
