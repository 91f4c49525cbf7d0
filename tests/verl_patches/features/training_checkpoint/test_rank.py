"""What ranks agree on before a checkpoint: the updates that an optimizer has made."""

from types import SimpleNamespace

import pytest
import torch

from post_training.checkpoint.files import CheckpointError
from verl_patches.features.training_checkpoint.fsdp_rank import FsdpRank
from verl_patches.features.training_checkpoint.rank import common_steps
from verl_patches.features.training_checkpoint.saving import entries_of


@pytest.mark.parametrize(("steps", "common"), [([], 0), ([0], 0), ([3], 3), ([3, 3, 3], 3)])
def test_shards_have_had_the_same_number_of_updates(steps, common):
    assert common_steps(SimpleNamespace(steps=each) for each in steps) == common


def test_other_numbers_of_updates_are_refused_with_all_of_them():
    with pytest.raises(CheckpointError, match=r"different numbers of updates: \[2, 3, 10\]$"):
        common_steps([SimpleNamespace(steps=each) for each in (10, 2, 3, 2)])


@pytest.mark.parametrize(("rank", "names"), [(0, ["inner.running_mean"]), (1, []), (2, [])])
def test_of_all_fsdp_ranks_the_first_writes_what_no_optimizer_updates(rank, names):
    inner = torch.nn.Module()
    inner.register_buffer("running_mean", torch.ones(2))
    inner.register_buffer("made_again", torch.ones(2), persistent=False)
    model = torch.nn.Module()
    model.add_module("inner", inner)
    held = FsdpRank(model, None, rank, 3)
    assert [piece.canonical for piece in held.untrained] == names and len(entries_of(held)) == len(names)
    assert held.shapes == {"inner.running_mean": (2,)}
