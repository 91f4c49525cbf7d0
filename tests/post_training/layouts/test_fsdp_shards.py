"""The shards of an FSDP2 rank, by the placements of its parameters."""

import pytest
import torch
import torch_npu  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as Sharded

from post_training.layouts import fsdp_shards as module
from post_training.layouts.fsdp_shards import fsdp_shards

NAME = "model.norm.weight"


@pytest.mark.parametrize("placements", [(Partial(), Sharded(0)), (Replicate(), Partial()), (Replicate(), Sharded(0))])
def test_sum_that_is_still_to_come_rejected(lone_rank, placements):
    mesh = init_device_mesh("npu", (1, 1))
    state = {NAME: DTensor.from_local(torch.zeros(4, device="npu"), mesh, placements, run_check=False)}
    if any(placement.is_partial() for placement in placements):
        with pytest.raises(
            ValueError, match=f"{NAME} has the placements .* with which no rank owns a part of the weight"
        ):
            fsdp_shards(state, {NAME: (4,)})
    else:
        assert [shard.bounds for shard in fsdp_shards(state, {NAME: (4,)})] == [((0, 4),)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_packed_experts_of_every_rank_are_those_of_the_files(monkeypatch, ranks):
    """Shard six experts of width 3 over rank counts that may not divide them: the last ranks have fewer or none."""
    experts, width, hidden, prefix = 6, 3, 5, "model.layers.4.mlp.experts."
    files = {
        f"{prefix}{expert}.{part}.weight": torch.randn((hidden, width) if part == "down_proj" else (width, hidden))
        for expert in range(experts)
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    whole = {
        f"{prefix}gate_up_proj": torch.stack(
            [
                torch.cat([files[f"{prefix}{expert}.{part}_proj.weight"] for part in ("gate", "up")])
                for expert in range(experts)
            ]
        ),
        f"{prefix}down_proj": torch.stack([files[f"{prefix}{expert}.down_proj.weight"] for expert in range(experts)]),
    }
    shapes = {name: tuple(value.shape) for name, value in files.items()}
    each, found = -(-experts // ranks), []
    for rank in range(ranks):
        first, last = min(rank * each, experts), min(rank * each + each, experts)
        rows = ((first, last), (0, 2 * width), (0, hidden)), ((first, last), (0, hidden), (0, width))
        bounds = dict(zip(whole, rows, strict=True))
        monkeypatch.setattr(module, "_bounds", lambda name, value, bounds=bounds: bounds[name])
        local = {name: value[first:last] for name, value in whole.items()}
        for shard in fsdp_shards(whole, shapes):
            assert shard.bounds == tuple((0, extent) for extent in shapes[shard.hf_name])
            assert torch.equal(shard.locate(local), files[shard.hf_name])
            found.append(shard.hf_name)
    assert sorted(found) == sorted(files)


def test_names_in_memory_are_those_of_published_files():
    """transformers 5 nests the decoder and the vision tower in separate modules."""
    state = {"model.visual.merger.ln_q.weight": torch.zeros(4), "model.language_model.norm.weight": torch.zeros(4)}
    shards = fsdp_shards(state, {"visual.merger.ln_q.weight": (4,), "model.norm.weight": (4,)})
    assert {shard.local: shard.hf_name for shard in shards} == {
        "model.visual.merger.ln_q.weight": "visual.merger.ln_q.weight",
        "model.language_model.norm.weight": "model.norm.weight",
    }
