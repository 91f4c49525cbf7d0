"""What tensors take of a die, where tests compare it to the byte."""

import gc

import torch


def bytes_of_tensors() -> int:
    """Bytes of all tensors on the current device that neither Python's garbage nor work under way holds.

    torch_npu's `memory_allocated` is more: its allocator leaves up to 1 MiB at the end of what it took for a large one.
    """
    gc.collect()
    torch.npu.synchronize()
    torch.npu.empty_cache()  # what another stream used counts until the allocator looks at its event
    return torch.npu.memory_stats()["requested_bytes.all.current"]
