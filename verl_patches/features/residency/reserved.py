"""Device memory with reserved addresses: an allocation keeps its range of virtual addresses for the life of the
process, and physical memory is mapped there only while a phase needs it.

vLLM-Ascend's own allocator (`CaMemAllocator`, made for vLLM's sleep mode) does the mapping. Only its pool is used:
`Residency` decides, as for all other memory, which phase has the weights and which contents are copied to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from post_training.live_tensors import parameter_tensors
from post_training.reshard.mla_refresh import absorbed_tensors
from post_training.tensor_parts import copy_in_parts, host_copy
from verl_patches.features.residency.feature import reject_expandable_segments
from verl_patches.features.residency.storages import Resident, bytes_of, device_storages

# Attribute of the runner in which the adapter keeps the reserved memory of its weights.
RESERVED = "overlay_reserved_weights"


class ReservedMemory:
    """The pool of vLLM-Ascend's allocator, whose memory is unmapped and mapped as a whole.

    Nothing else may use that allocator: vLLM's sleep mode must be off, which residency ensures.

    Args:
        allocator: vLLM-Ascend's `CaMemAllocator`, with nothing in it.

    Raises:
        ConfigurationError: expandable segments are enabled, with which torch_npu takes no memory from pools.
    """

    def __init__(self, allocator: Any):
        reject_expandable_segments()
        self._allocator = allocator
        self._mapped = True
        self._allocated = 0

    @property
    def unmapped_bytes(self) -> int:
        """Bytes without physical memory that torch's own counters still call allocated: the tensors' part of the pool,
        whose segments are larger."""
        return 0 if self._mapped else self._allocated

    def move(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Move device storages with their contents into the pool.

        Call it only once: the allocator holds one pool, and entering it again would replace it by another. All storages
        wait on the host together, in ordinary memory, so that the device never holds any of them twice.

        Raises:
            RuntimeError: the pool did not get the memory.
        """
        with torch.inference_mode(False), torch.no_grad():
            waiting = [(storage, host_copy(bytes_of(storage))) for storage in storages]
            for storage, _ in waiting:
                storage.resize_(0)
            torch.npu.empty_cache()
            before = torch.npu.memory_allocated()
            with self._allocator.use_memory_pool():
                for storage, contents in waiting:
                    storage.resize_(contents.numel())
                    copy_in_parts(bytes_of(storage), contents)
            self._allocated = torch.npu.memory_allocated() - before
        wanted, got = sum(contents.numel() for _, contents in waiting), self._allocator.get_current_usage()
        if got < wanted:
            raise RuntimeError(f"the memory pool has {got} of {wanted} bytes; torch allocated the rest elsewhere")

    def unmap(self) -> None:
        """Give all physical memory back, unless that was done. Contents are lost, addresses stay."""
        if self._mapped:
            torch.npu.synchronize()
            self._allocator.sleep(offload_tags=())
            self._mapped = False

    def map(self) -> None:
        """Map physical memory at every address, unless it is there. Its contents are undefined."""
        if not self._mapped:
            self._allocator.wake_up()
            self._mapped = True


class ReservedGroup:
    """Residents in one `ReservedMemory`: they handle their contents, and it handles the memory.

    Args:
        memory: the memory of all parts.
        parts: residents that do not give memory back themselves.
    """

    def __init__(self, memory: ReservedMemory, parts: Sequence[Resident]):
        self._memory = memory
        self._parts = parts

    @property
    def unmapped_bytes(self) -> int:
        return self._memory.unmapped_bytes

    def offload(self, changed: bool = True) -> int:
        """Copy out kept contents, then give the memory of all parts back. Returns the bytes copied."""
        copied = sum(part.offload(changed) for part in self._parts)
        self._memory.unmap()
        return copied

    def onload(self) -> int:
        """Take the memory of all parts and restore kept contents. Returns the bytes copied."""
        self._memory.map()
        return sum(part.onload() for part in self._parts)


def reserve_weights(runner: Any) -> None:
    """Move all weights of a vLLM-Ascend model runner, including buffers and derived weights, to reserved memory.

    Call it after the model has been loaded, and before a graph is made of it.
    """
    from vllm_ascend.device_allocator.camem import CaMemAllocator

    memory, model = ReservedMemory(CaMemAllocator.get_instance()), runner.get_model()
    memory.move(device_storages([*parameter_tensors([model]), *absorbed_tensors(model)]).values())
    setattr(runner, RESERVED, memory)
