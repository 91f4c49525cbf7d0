"""A module for verl's `external_lib` that makes rank 1 hang in its second update."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from verl_plugin.engines import extend_engine

RANK, UPDATE = 1, 2


class Hangs:
    """A base class placed before a training engine of verl."""

    _updates = 0

    def optimizer_step(self) -> Any:
        self._updates += 1
        if (dist.get_rank(), self._updates) == (RANK, UPDATE):
            computes_for_ever()
        return super().optimizer_step()  # type: ignore[misc]  # of the engine that this extends


def computes_for_ever() -> None:
    while True:
        time.sleep(0.01)


extend_engine("fsdp2", Hangs)
