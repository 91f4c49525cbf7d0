import pytest
import torch
import torch_npu  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.features.residency.storages import StorageGroup, device_storages


def on_device(*shape):
    return torch.randn(*shape).npu()


def test_memory_leaves_and_every_view_comes_back_with_its_bytes():
    flat = on_device(64, 64)
    view, transposed = flat[3:9].view(-1), flat.t()
    expected = flat.cpu().clone()
    group = StorageGroup(lambda: [flat, view])
    before = torch.npu.memory_allocated()
    group.offload()
    assert before - torch.npu.memory_allocated() >= flat.numel() * 4
    assert flat.untyped_storage().nbytes() == 0
    on_device(64, 64).zero_()  # other users of the memory leave different bytes there
    group.onload()
    assert torch.npu.memory_allocated() == before
    assert torch.equal(flat.cpu(), expected)
    assert torch.equal(view.cpu(), expected[3:9].view(-1))
    assert torch.equal(transposed.cpu(), expected.t())


def test_memory_is_given_back_only_after_the_copies_have_ended(monkeypatch):
    """A device only queues the copies: they are complete once the host has waited."""
    tensor = on_device(11)
    expected, waited = tensor.cpu().view(torch.uint8), []
    group = StorageGroup(lambda: [tensor])
    synchronize = torch.npu.synchronize

    def wait():
        synchronize()
        waited.append(
            (tensor.untyped_storage().nbytes(), [torch.equal(copy, expected) for copy in group._host.values()])
        )

    monkeypatch.setattr(torch.npu, "synchronize", wait)
    group.offload()
    assert waited == [(44, [True])] and tensor.untyped_storage().nbytes() == 0


def test_what_the_host_holds_is_whole_when_the_tensors_have_left():
    tensor = on_device(400, 400)
    group = StorageGroup(lambda: [tensor])
    for value in range(8):
        tensor.fill_(value)
        group.offload()
        assert group.host_copy(tensor).eq(value).all()
        group.onload()


def test_the_host_copy_of_a_view_has_its_place_strides_and_dtype():
    """Megatron's parameters are views of one buffer, and an optimizer's shards may start anywhere in it."""
    buffer = torch.arange(60.0).npu()
    views = [buffer[12:36].view(4, 6), buffer[7:19], buffer[:30].view(5, 6).t()[2:], buffer[50:].view(torch.int32)]
    expected = [view.cpu() for view in views]
    group = StorageGroup(lambda: views)
    group.copy_out()
    group.offload()
    for view, wanted in zip(views, expected, strict=True):
        held = group.host_copy(view)
        assert held.dtype == wanted.dtype and torch.equal(held, wanted)
    assert group.host_copy(on_device(3)) is None


def test_offload_and_onload_twice_change_nothing_more():
    tensor = on_device(5)
    expected = tensor.cpu().clone()
    group = StorageGroup(lambda: [tensor])
    group.onload()
    group.offload()
    group.offload()
    group.onload()
    group.onload()
    assert torch.equal(tensor.cpu(), expected)


def test_values_written_while_on_the_device_are_the_ones_that_return():
    tensor = on_device(7)
    group = StorageGroup(lambda: [tensor])
    for value in (1.0, 2.0):
        tensor.fill_(value)
        group.offload()
        group.onload()
        assert tensor.cpu().eq(value).all()


def test_unchanged_contents_are_copied_out_once():
    tensor = on_device(11)
    expected = tensor.cpu().clone()
    group = StorageGroup(lambda: [tensor])
    copied = []
    for _ in range(3):
        copied.append(group.offload(changed=False))
        assert tensor.untyped_storage().nbytes() == 0
        assert group.onload() == 44
        assert torch.equal(tensor.cpu(), expected)
    assert copied == [44, 0, 0]


def test_undeclared_write_is_not_lost():
    tensor, constant = on_device(11), on_device(5)
    group = StorageGroup(lambda: [tensor[2:], constant])
    group.offload(changed=False)
    group.onload()
    tensor.fill_(3.0)
    assert group.offload(changed=False) == 44
    group.onload()
    assert tensor.cpu().eq(3.0).all()


def test_only_what_appeared_later_is_copied_when_the_rest_is_unchanged():
    tensors = [on_device(3)]
    group = StorageGroup(lambda: tensors)
    group.offload(changed=False)
    group.onload()
    tensors.append(on_device(4))
    assert group.offload(changed=False) == 16
    group.onload()


def test_a_new_tensor_in_the_place_of_one_that_is_gone_has_its_own_contents():
    tensors = [on_device(11)]
    group = StorageGroup(lambda: tensors)
    for value in range(20):
        tensors[:] = []
        tensors.append(torch.full((11,), float(value), device="npu"))
        group.offload(changed=False)
        group.onload()
        assert tensors[0].cpu().eq(value).all()
    assert len(group._host) == 1


def test_zeroed_contents():
    tensor = on_device(9)
    group = StorageGroup(lambda: [tensor], "zeroed")
    group.offload()
    group.onload()
    assert not tensor.cpu().any()


def test_rebuilt_contents_are_not_copied():
    tensor = on_device(9)
    group = StorageGroup(lambda: [tensor], "rebuilt")
    group.offload()
    assert not group._host
    group.onload()
    assert tensor.untyped_storage().nbytes() == 36


def test_excluded_and_host_tensors_stay():
    shared, own, host = on_device(8), on_device(8), torch.ones(8)
    StorageGroup(lambda: [shared[:2], own, host], excluding=lambda: [shared]).offload()
    assert shared.untyped_storage().nbytes() and host.sum() == 8
    assert own.untyped_storage().nbytes() == 0


def test_tensors_that_appear_later_are_moved_too():
    tensors = [on_device(3)]
    group = StorageGroup(lambda: tensors)
    group.offload()
    group.onload()
    tensors.append(on_device(4))
    group.offload()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    group.onload()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_bits_of_every_dtype(dtype):
    expected = torch.randint(0, 2, (33,)).to(dtype)
    tensor = expected.npu()
    group = StorageGroup(lambda: [tensor])
    group.offload()
    group.onload()
    assert torch.equal(tensor.cpu(), expected)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_storages_are_counted_once(owners):
    bases = [on_device(6) for _ in range(4)]
    tensors = [bases[owner][owner:] for owner in owners]
    assert len(device_storages(tensors)) == len(set(owners))


def test_inference_tensors_can_be_moved():
    with torch.inference_mode():
        tensor = on_device(6)
    expected = tensor.cpu().clone()
    group = StorageGroup(lambda: [tensor])
    group.offload()
    group.onload()
    assert torch.equal(tensor.cpu(), expected)
