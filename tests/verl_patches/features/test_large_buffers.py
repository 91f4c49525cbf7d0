"""Everything that touches large device buffers works in parts, and gives the same result as on the whole."""

import pytest
import torch
import torch_npu  # noqa: F401

from post_training import tensor_parts
from post_training.finite_steps import finite
from post_training.finite_steps.guard import any_nonfinite
from post_training.layouts.layout import Shard
from post_training.reshard.exchange import Side
from post_training.reshard.resharder import LocalCopy, Resharder, copy_local
from tests.large_operations import LargestOperation
from verl_patches.features.residency.storages import StorageGroup
from verl_patches.features.training_checkpoint.background import _host_view

SMALL = 64
BOX = ((0, 20), (0, 30))


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(tensor_parts, "PART_ELEMENTS", SMALL)
    monkeypatch.setattr(finite, "CHECKED_ELEMENTS", SMALL)


@pytest.mark.parametrize("contents", ["kept", "zeroed"])
def test_residency_moves_storages_in_parts(small_parts, contents):
    tensor = torch.randn(100).npu()
    expected = tensor.cpu() if contents == "kept" else torch.zeros(100)
    group = StorageGroup(lambda: [tensor], contents)
    with LargestOperation() as largest:
        group.offload()
        group.onload()
    assert largest.elements <= SMALL and torch.equal(tensor.cpu(), expected)


def test_finite_check_works_in_parts(small_parts, lone_rank):
    gradient = torch.randn(10, 100).npu()
    with LargestOperation() as largest:
        assert not any_nonfinite([gradient])
    assert 0 < largest.elements <= SMALL


def test_checkpoint_copies_host_views_in_parts(small_parts):
    tensor = torch.randn(300).npu()
    with LargestOperation() as largest:
        copied = _host_view(tensor, lambda _: None)
    assert largest.elements <= SMALL and torch.equal(copied, tensor.cpu())


def test_local_reshard_copies_in_parts(small_parts):
    values = {"train": torch.randn(20, 30).npu(), "rollout": torch.zeros(20, 30).npu()}
    shards = [Shard("weight", BOX, name) for name in values]
    sides = [Side(values, [shard], {"weight": torch.float32}) for shard in shards]
    whole = (slice(0, 20), slice(0, 30))
    with LargestOperation() as largest:
        copy_local([LocalCopy(*shards, whole, whole)], *sides)
    assert largest.elements <= SMALL and torch.equal(values["train"].cpu(), values["rollout"].cpu())


def test_reshard_bucket_stays_below_2_to_the_30(lone_rank):
    """A bucket is one collective of bytes, and a chunk of it is one copy."""
    assert Resharder({}, {}, [[]], [[]], lone_rank, 2**33)._bucket_bytes < 2**30
    assert Resharder({}, {}, [[]], [[]], lone_rank, 2**26)._bucket_bytes == 2**26
