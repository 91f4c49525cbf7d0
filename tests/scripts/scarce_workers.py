"""Imported by the process that Ray's workers are forked from: updates after the second step have so many bytes of a die
as the file `limit` in the run's folder says, and no more."""

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
    """A phase, with less memory if it is one of those updates."""
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


Signs.phase = limited  # type: ignore[method-assign]  # of this process and of those that it forks
