"""Exact device memory of tensors, for tests that compare it to the byte."""

import gc

import torch


def bytes_of_tensors() -> int:
    """Return the bytes of all live tensors on the current device, after garbage collection and synchronization.

    torch_npu's `memory_allocated` is more: its allocator leaves up to 1 MiB unused at the end of a large block.
    """
    gc.collect()
    torch.npu.synchronize()
    torch.npu.empty_cache()  # memory used by another stream counts until the allocator checks its event
    return torch.npu.memory_stats()["requested_bytes.all.current"]
