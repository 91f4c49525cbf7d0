"""Imported by the process from which Ray's workers are forked: limits the device memory of updates after the second
step to the number of bytes in the file `limit` in the run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from post_training.hang_detection.signs import Signs
from verl_patches.features import settings

LIMIT_NAME, AFTER = "limit", "global_step_2"
_phase = Signs.phase


@contextmanager
def limited(self: Signs, name: str) -> Iterator[None]:
    """Run a phase, with less memory if it is one of those updates."""
    folder = Path(settings.current().measure.output_dir)
    scarce = name == "update" and (folder / "checkpoints" / AFTER).is_dir()
    if scarce:
        capacity = torch.npu.mem_get_info()[1]
        torch.npu.set_per_process_memory_fraction(int((folder / LIMIT_NAME).read_text()) / capacity)
    try:
        with _phase(self, name):
            yield
    finally:
        if scarce:
            torch.npu.set_per_process_memory_fraction(1.0)


Signs.phase = limited  # type: ignore[method-assign]  # in this process and those that it forks
