"""What a rank of FSDP2 holds, by the placements of its parameters."""

import pytest
import torch
import torch_npu  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as Sharded

from post_training.layouts.fsdp_shards import fsdp_shards

NAME = "model.norm.weight"


@pytest.mark.parametrize("placements", [(Partial(), Sharded(0)), (Replicate(), Partial()), (Replicate(), Sharded(0))])
def test_sum_that_is_still_to_come_rejected(lone_rank, placements):
    mesh = init_device_mesh("npu", (1, 1))
    state = {NAME: DTensor.from_local(torch.zeros(4, device="npu"), mesh, placements, run_check=False)}
    if any(placement.is_partial() for placement in placements):
        with pytest.raises(ValueError, match=f"{NAME} is placed as .* of which no rank holds a part of the weight"):
            fsdp_shards(state, {NAME: (4,)})
    else:
        assert [shard.bounds for shard in fsdp_shards(state, {NAME: (4,)})] == [((0, 4),)]


def test_names_in_memory_are_those_of_published_files():
    """transformers 5 has the parts of a model of images in a module of their own."""
    state = {"model.visual.merger.ln_q.weight": torch.zeros(4), "model.language_model.norm.weight": torch.zeros(4)}
    shards = fsdp_shards(state, {"visual.merger.ln_q.weight": (4,), "model.norm.weight": (4,)})
    assert {shard.local: shard.hf_name for shard in shards} == {
        "model.visual.merger.ln_q.weight": "visual.merger.ln_q.weight",
        "model.language_model.norm.weight": "model.norm.weight",
    }
