"""Patches of verl's batches: they count their serialized bytes, and wait for copies from and to an NPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.compatibility.feature import VERL_ON_NPU
from verl_patches.features.measure.feature import MEASURE

if TYPE_CHECKING:
    import torch
    from verl import DataProto


@wrap(
    "verl.protocol:DataProto.__getstate__",
    feature=MEASURE,
    evidence="executed",
    why="the bytes that the driver sends to workers decide how late the last of them starts, and nothing reports them",
)
def getstate(upstream: Callable[..., tuple[Any, ...]], self: DataProto) -> tuple[Any, ...]:
    from verl_patches.features.measure import serialized

    state = upstream(self)
    serialized.add(len(state[0]))
    return state


@wrap(
    "verl.protocol:DataProto.to",
    feature=VERL_ON_NPU,
    evidence="executed",
    why="tensordict waits only for copies that it begins on CUDA: log-probs of a worker are sent to the driver before "
    "torch_npu's queue has copied them, and a batch may be freed before it is on the device",
    upstream="https://github.com/verl-project/verl/pull/3222",
    remove_when="the pinned verl or tensordict waits for copies from and to an NPU",
)
def to(upstream: Callable[..., DataProto], self: DataProto, device: torch.device | str | int) -> DataProto:
    from verl.utils.device import get_torch_device, is_npu_available

    moved = upstream(self, device)
    # A process that only passes batches on has not touched its NPUs.
    if is_npu_available and get_torch_device().is_initialized():
        get_torch_device().synchronize()
    return moved
