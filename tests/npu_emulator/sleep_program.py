"""Puts vLLM-Ascend's memory pool to sleep while torch_npu's queue still holds work that writes there.

Prints whether the pool, awake again, has the weights of the last write. Without the argument "patched" it uses
vLLM-Ascend's own allocator.
"""

import sys

import torch
import torch_npu  # noqa: F401

MEBIBYTE = 1 << 20
WRITES = 100


def main() -> None:
    import vllm_ascend.device_allocator.camem as camem

    if "patched" in sys.argv:
        from tests.demonstrations import installed
        from vllm_ascend_patches.device_allocator.camem import sleep

        camem.CaMemAllocator.sleep = installed(sleep, camem.CaMemAllocator.sleep)
    torch.npu.set_device(0)
    allocator = camem.CaMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="weights"):
        weights = torch.zeros(64 * MEBIBYTE, dtype=torch.int8, device="npu")
    torch.npu.synchronize()
    for _ in range(WRITES):
        weights.add_(1)
    allocator.sleep(offload_tags=("weights",))
    torch.npu.synchronize()
    allocator.wake_up()
    print("kept" if bool((weights == WRITES).all()) else "changed")


if __name__ == "__main__":
    main()
