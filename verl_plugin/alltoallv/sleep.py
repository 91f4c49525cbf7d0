"""Lets a vLLM worker sleep without copying the weights that the next update writes anyway.

vLLM-Ascend has two sleep levels. Level 1, which verl uses on NPUs, copies every weight to the host and back in each
step. Level 2 copies none, and loses everything that no update writes: tables of rotary embeddings, maps of experts, and
whatever else lies in the pool of weights. Here exactly these tensors are copied, and the rest is given up. They are
found by address, so it does not matter which module made or holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from post_training.device_phases import PhaseMeter
from verl_plugin.alltoallv.settings import SETTINGS_KEY

_TO_HOST, _TO_DEVICE = 2, 1  # ACL_MEMCPY_DEVICE_TO_HOST, ACL_MEMCPY_HOST_TO_DEVICE
# vLLM's tags for everything that it allocates while it loads a model, and for the cache.
_WEIGHTS, _KV_CACHE = "weights", "kv_cache"


@dataclass(frozen=True)
class Block:
    """A stretch of device memory: address and size in bytes, of a pool allocation or of one storage in it."""

    address: int
    size: int


class DiscardingSleep:
    """Replaces `sleep` and `wake_up` of a worker.

    Args:
        worker: vLLM-Ascend's.
        written: returns the tensors that every update writes completely; None as long as they are not known, in which
            case the worker sleeps as upstream does.
        discarded: called after weights have been given up, so that nothing is sampled with undefined weights.
    """

    def __init__(
        self, worker: Any, written: Callable[[], list[torch.Tensor] | None], discarded: Callable[[], None]
    ) -> None:
        self._upstream_sleep, self._upstream_wake_up = worker.sleep, worker.wake_up
        self._written, self._discarded = written, discarded
        self._blocks: list[Block] = []
        self._host = torch.empty(0, dtype=torch.uint8)
        worker.sleep, worker.wake_up = self.sleep, self.wake_up

    @property
    def kept_bytes(self) -> int:
        """Bytes that the host keeps for a sleeping worker; 0 while it is awake, and if it sleeps as upstream does."""
        return sum(block.size for block in self._blocks)

    def sleep(self, level: int = 1) -> None:
        """Copy blocks that no update writes whole to the host, and give up the rest; see the worker's `sleep`."""
        written = self._written()
        if written is None or self._blocks:
            self._upstream_sleep(level)
            return
        self._blocks = blocks_to_keep(_pool(), torch.npu.memory_snapshot(), written)
        if self._host.numel() < self.kept_bytes:
            self._host = torch.empty(self.kept_bytes, dtype=torch.uint8, pin_memory=True)
        torch.npu.synchronize()
        self._copy(_TO_HOST)
        self._upstream_sleep(level=2)
        self._discarded()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Copy the kept blocks back from the host; see the worker's `wake_up`."""
        self._upstream_wake_up(tags)
        if tags is None or _WEIGHTS in tags:
            self._copy(_TO_DEVICE)
            self._blocks = []

    def _copy(self, direction: int) -> None:
        from vllm_ascend.device_allocator.camem import memcpy  # of CANN

        place = self._host.data_ptr()
        for block in self._blocks:
            to, of = (place, block.address) if direction == _TO_HOST else (block.address, place)
            if status := memcpy(to, block.size, of, block.size, direction):
                raise RuntimeError(
                    f"a sleeping worker could not copy {block.size} bytes (aclrtMemcpy returned {status}). Set "
                    f"{SETTINGS_KEY}.discard_on_sleep to false to sleep as upstream does."
                )
            place += block.size


def _pool() -> list[Block]:
    """Return the allocations of vLLM-Ascend's allocator for weights."""
    from vllm_ascend.device_allocator.camem import CaMemAllocator

    allocations = CaMemAllocator.get_instance().pointer_to_data.items()
    return [Block(address, data.handle[1]) for address, data in allocations if data.tag == _WEIGHTS]


def blocks_to_keep(
    pool: Sequence[Block], snapshot: Iterable[Mapping[str, Any]], written: Iterable[torch.Tensor]
) -> list[Block]:
    """Return the blocks in `pool` that are in use and that an update does not overwrite completely.

    Args:
        pool: allocations.
        snapshot: segments of torch's allocator with their blocks, as `torch.npu.memory_snapshot` returns them.
        written: tensors that an update writes completely.
    """
    covered: dict[int, int] = {}
    for tensor in written:
        if _is_dense(tensor):
            covered[tensor.data_ptr()] = max(tensor.numel() * tensor.itemsize, covered.get(tensor.data_ptr(), 0))
    kept = []
    for segment in snapshot:
        within = any(each.address <= segment["address"] < each.address + each.size for each in pool)
        for block in segment["blocks"] if within else ():
            if block["state"] != "inactive" and covered.get(block["address"], 0) < block["requested_size"]:
                kept.append(Block(block["address"], block["size"]))
    return kept


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill one stretch of memory, in any order of dimensions."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == span


class RolloutMeter(PhaseMeter):
    """Meters a worker from the return of its KV cache until it sleeps.

    Args:
        worker: vLLM-Ascend's, whose `sleep` and `wake_up` this wraps.
    """

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self._upstream_sleep, self._upstream_wake_up = worker.sleep, worker.wake_up
        worker.sleep, worker.wake_up = self.sleep, self.wake_up

    def sleep(self, level: int = 1) -> None:
        """See the worker's `sleep`."""
        self.end()
        self._upstream_sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """See the worker's `wake_up`. Until all memory is back, torch's numbers count memory that is not on the die."""
        self._upstream_wake_up(tags)
        if tags is None or _KV_CACHE in tags:
            self.begin("rollout")
