"""vLLM-Ascend's sleep mode waits for pending writes before it unmaps memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.compatibility.feature import SLEEP_MODE

if TYPE_CHECKING:
    from vllm_ascend.device_allocator.camem import CaMemAllocator


@wrap(
    "vllm_ascend.device_allocator.camem:CaMemAllocator.sleep",
    feature=SLEEP_MODE,
    why="it copies and unmaps memory while operators that write there still wait in torch_npu's queue: weights keep "
    "their old values, and the process ends at an unmapped address; unmapping does not wait by itself",
    upstream="https://github.com/vllm-project/vllm-ascend/pull/13757",
    remove_when="the pinned vLLM-Ascend waits for the device before it unmaps memory",
)
def sleep(
    upstream: Callable[..., None], self: CaMemAllocator, offload_tags: tuple[str, ...] | str | None = None
) -> None:
    import torch

    torch.npu.synchronize()
    upstream(self, offload_tags)
