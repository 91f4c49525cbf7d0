"""Ranks agree before a checkpoint on the number of updates, and own the right shards."""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.training_rank import common_steps
from verl_patches.features.training_checkpoint.fsdp_rank import FsdpRank, FullyShardedRank
from verl_patches.features.training_checkpoint.saving import entries_of

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize(("steps", "common"), [([], 0), ([0], 0), ([3], 3), ([3, 3, 3], 3)])
def test_shards_have_had_the_same_number_of_updates(steps, common):
    assert common_steps(SimpleNamespace(steps=each) for each in steps) == common


def test_other_numbers_of_updates_rejected_with_all_of_them():
    with pytest.raises(CheckpointError, match=r"different numbers of updates: \[2, 3, 10\]$"):
        common_steps([SimpleNamespace(steps=each) for each in (10, 2, 3, 2)])


@pytest.mark.parametrize(("rank", "names"), [(0, ["inner.running_mean"]), (1, []), (2, [])])
def test_first_fsdp_rank_writes_tensors_without_optimizer(rank, names):
    inner = torch.nn.Module()
    inner.register_buffer("running_mean", torch.ones(2))
    inner.register_buffer("made_again", torch.ones(2), persistent=False)
    model = torch.nn.Module()
    model.add_module("inner", inner)
    held = FsdpRank(model, None, rank, 3)
    assert [shard.hf_name for shard in held.untrained] == names and len(entries_of(held)) == len(names)
    assert held.shapes == {"inner.running_mean": (2,)}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_fsdp2_shards_are_torchs_chunks_of_rows(world_size):
    """If rows do not divide, torch gives the last ranks fewer rows or none.

    This runs in a separate process, because it needs one process group after another.
    """
    program = f"from {__name__} import compare_shards; compare_shards({world_size})"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def fake_rank(rank: int, world_size: int) -> DeviceMesh:
    """Make this process a rank of `world_size` whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    return init_device_mesh("cpu", (world_size,))


def compare_shards(world_size: int) -> None:
    """Compare the shards of every rank with torch's chunks."""
    shapes = {"embed": (101, 3), "norm": (5,), "score": (1, 4), "down": (6, 7)}
    whole = {name: torch.arange(math.prod(shape), dtype=torch.float32) for name, shape in shapes.items()}
    for rank in range(world_size):
        mesh, model = fake_rank(rank, world_size), torch.nn.Module()
        for name, shape in shapes.items():
            chunks = whole[name].view(shape).chunk(world_size)
            mine = chunks[rank] if rank < len(chunks) else torch.empty(0, *shape[1:])
            held = DTensor.from_local(
                mine,
                mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size(shape),
                stride=whole[name].view(shape).stride(),
            )
            model.register_parameter(name, torch.nn.Parameter(held))
        optimizer = torch.optim.AdamW(model.parameters())
        found = {shard.local: shard for shard in FullyShardedRank(model, optimizer, rank, world_size).optimizer_shards}
        assert found.keys() == {name for name in shapes if model.get_parameter(name).to_local().numel()}
        for name, shard in found.items():
            assert shard.shape == shapes[name]
            assert torch.equal(shard.master, whole[name][shard.start : shard.stop]), (name, rank)
