"""vllm-ascend's sleep mode: its own allocator, unmodified, takes memory away from tensors and puts it back."""

import gc

import acl
import pytest
import torch
import torch_npu  # noqa: F401

from npu_emulator import _C

pytestmark = pytest.mark.slow  # importing vLLM takes long

MEBIBYTE = 1 << 20


@pytest.fixture
def allocator():
    import torchair  # noqa: F401  vllm-ascend imports it first
    from vllm_ascend.device_allocator.camem import CaMemAllocator

    torch.npu.set_device(0)
    made = CaMemAllocator()
    yield made
    gc.collect()
    assert not made.pointer_to_data, "tensors are gone, but not from the pool"


@pytest.fixture
def small_die():
    capacity = _C.memory_statistics(0)["capacity"]
    torch.npu.empty_cache()
    _C.set_capacity(0, torch.npu.memory_allocated(0) + 8 * MEBIBYTE)
    yield
    _C.set_capacity(0, capacity)


def test_weights_come_back_and_the_rest_comes_back_empty(allocator):
    with allocator.use_memory_pool(tag="weights"):
        weight = torch.arange(3 * 1000.0, device="npu").view(3, 1000)
        product = weight * 2
    with allocator.use_memory_pool(tag="kv_cache"):
        cache = torch.ones(MEBIBYTE, dtype=torch.uint8, device="npu")
    outside = torch.full((5,), 7.0, device="npu")
    addresses = [tensor.data_ptr() for tensor in (weight, product, cache)]
    free = torch.npu.mem_get_info()[0]
    assert allocator.get_current_usage() == MEBIBYTE + 2 * 12288
    allocator.sleep(offload_tags=("weights",))
    assert torch.npu.mem_get_info()[0] == free + MEBIBYTE + 2 * 12288
    assert outside.tolist() == [7] * 5
    allocator.wake_up()
    assert torch.npu.mem_get_info()[0] == free
    assert [tensor.data_ptr() for tensor in (weight, product, cache)] == addresses
    assert torch.equal(weight.cpu().flatten(), torch.arange(3000.0))
    assert torch.equal(product.cpu().flatten(), 2 * torch.arange(3000.0))
    assert cache.sum() == 0


def test_memory_that_sleeps_may_not_be_used(allocator):
    with allocator.use_memory_pool():
        tensor = torch.ones(4, device="npu")
    view = tensor[1:]
    allocator.sleep()
    for use in (lambda: tensor + 1, lambda: view.sum(), lambda: tensor.cpu(), lambda: tensor.fill_(3), tensor.tolist):
        with pytest.raises(RuntimeError, match="taken away by the pool"):
            use()
    allocator.wake_up()
    assert view.tolist() == [1, 1, 1]


def test_one_tag_wakes_alone(allocator):
    with allocator.use_memory_pool(tag="weights"):
        weight = torch.ones(4, device="npu")
    with allocator.use_memory_pool(tag="kv_cache"):
        cache = torch.ones(4, device="npu")
    allocator.sleep(offload_tags=("weights",))
    allocator.wake_up(tags=["weights"])
    assert weight.tolist() == [1] * 4
    with pytest.raises(RuntimeError, match="taken away by the pool"):
        cache.tolist()
    allocator.wake_up(tags=["kv_cache"])
    assert cache.tolist() == [0] * 4


def test_what_sleeps_leaves_its_room_to_others_and_is_refused_without_it(allocator, small_die):
    with allocator.use_memory_pool(tag="weights"):
        weight = torch.ones(5 * MEBIBYTE, dtype=torch.uint8, device="npu")
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(5 * MEBIBYTE, dtype=torch.uint8, device="npu")
    allocator.sleep(offload_tags=("weights",))
    other = torch.ones(5 * MEBIBYTE, dtype=torch.uint8, device="npu")
    with pytest.raises(torch.OutOfMemoryError):
        allocator.wake_up()
    del other
    torch.npu.empty_cache()
    allocator.wake_up()
    assert weight.min() == 1


@pytest.mark.parametrize("asleep", [False, True])
def test_tensors_of_the_pool_give_everything_back_a_hundred_times(allocator, asleep):
    allocated, reserved = torch.npu.memory_allocated(), torch.npu.memory_reserved()
    for _ in range(100):
        with allocator.use_memory_pool():
            tensor = torch.ones(1000, device="npu").add(1).sort().values
        if asleep:
            allocator.sleep()
        del tensor
    assert torch.npu.memory_allocated() == allocated and torch.npu.memory_reserved() <= max(reserved, allocated + 512)
    assert not allocator.pointer_to_data


def test_nothing_outside_the_context_is_of_the_pool(allocator):
    with allocator.use_memory_pool():
        pass
    tensor = torch.ones(4, device="npu")
    assert not allocator.pointer_to_data
    allocator.sleep()
    assert tensor.tolist() == [1] * 4


def test_an_allocator_in_a_library_is_refused():
    with pytest.raises(NotImplementedError, match="in /lib/own.so cannot manage emulated memory"):
        torch.npu.memory.NPUPluggableAllocator("/lib/own.so", "my_malloc", "my_free")
    assert acl.rt.get_device_count()[1] == 0
