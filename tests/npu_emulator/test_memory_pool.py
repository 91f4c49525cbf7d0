"""vllm-ascend's sleep mode: its own allocator, unmodified, takes memory away from tensors and puts it back."""

import gc
import uuid

import pytest
import torch
import torch_npu  # noqa: F401

from tests.npu_emulator.device_process import DeviceProcess

pytestmark = pytest.mark.slow  # importing vLLM takes long

MEBIBYTE = 1 << 20
# Sizes that torch_npu asks the pool for: the first for small tensors, the second for larger ones.
SMALL, LARGE = 2 * MEBIBYTE, 20 * MEBIBYTE


def make_allocator():
    import torchair  # noqa: F401  vllm-ascend imports it first
    from vllm_ascend.device_allocator.camem import CaMemAllocator

    torch.npu.set_device(0)
    return CaMemAllocator()


@pytest.fixture
def allocator():
    yield make_allocator()
    gc.collect()
    torch.npu.synchronize()


def free() -> int:
    """Return the free memory of the die once all work is done; the allocator itself waits for none."""
    torch.npu.synchronize()
    return torch.npu.mem_get_info()[0]


def test_weights_come_back_and_the_rest_comes_back_empty(allocator):
    outside = torch.full((5,), 7.0, device="npu")
    before = free()
    with allocator.use_memory_pool(tag="weights"):
        weight = torch.arange(3 * 1000.0, device="npu").view(3, 1000)
        product = weight * 2
    with allocator.use_memory_pool(tag="kv_cache"):
        cache = torch.ones(2 * MEBIBYTE, dtype=torch.uint8, device="npu")
    addresses = [tensor.data_ptr() for tensor in (weight, product, cache)]
    assert allocator.get_current_usage() == before - free() == SMALL + LARGE
    allocator.sleep(offload_tags=("weights",))
    assert free() == before
    assert outside.tolist() == [7] * 5
    allocator.wake_up()
    assert free() == before - SMALL - LARGE
    assert [tensor.data_ptr() for tensor in (weight, product, cache)] == addresses
    assert torch.equal(weight.cpu().flatten(), torch.arange(3000.0))
    assert torch.equal(product.cpu().flatten(), 2 * torch.arange(3000.0))
    assert cache.sum() == 0


def test_one_tag_wakes_alone(allocator):
    with allocator.use_memory_pool(tag="weights"):
        weight = torch.ones(4, device="npu")
    with allocator.use_memory_pool(tag="kv_cache"):
        cache = torch.ones(2 * MEBIBYTE, dtype=torch.uint8, device="npu")
    before = free()
    allocator.sleep(offload_tags=("weights",))
    allocator.wake_up(tags=["weights"])
    assert weight.tolist() == [1] * 4 and free() == before + LARGE
    allocator.wake_up(tags=["kv_cache"])
    assert not cache.any() and free() == before


def test_nothing_outside_the_context_is_of_the_pool(allocator):
    with allocator.use_memory_pool():
        pass
    tensor = torch.ones(4, device="npu")
    torch.npu.synchronize()
    assert not allocator.pointer_to_data
    allocator.sleep()
    assert tensor.tolist() == [1] * 4


def make_room(state: dict) -> list[bool]:
    """Return whether 40 MiB fit beside a pool of that size that is awake, or asleep, and whether it wakes unchanged."""
    allocator = make_allocator()
    with allocator.use_memory_pool(tag="weights"):
        weight = torch.ones(40 * MEBIBYTE, dtype=torch.uint8, device="npu")
    fits = []
    for is_asleep in (False, True):
        free()
        if is_asleep:
            allocator.sleep(offload_tags=("weights",))
        try:
            other = torch.ones(40 * MEBIBYTE, dtype=torch.uint8, device="npu")
            fits.append(bool(other.min() == 1))
        except RuntimeError as error:
            assert "out of memory" in str(error)
            fits.append(False)
    del other
    torch.npu.empty_cache()
    allocator.wake_up()
    return [*fits, bool(weight.min() == 1)]


def test_sleeping_pool_leaves_its_memory_to_others():
    with DeviceProcess(NPU_EMULATOR_NODE=f"test-{uuid.uuid4().hex}", NPU_EMULATOR_CAPACITY_MB="64") as process:
        assert process(make_room) == [False, True, True]
