"""Sizes of a vision tower are read from config.json, and rollout ranks have the right shards of it."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest

from post_training.layouts.vision_tower import VisionShape, hf_shapes, vllm_ascend

VALUES = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 14, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "out_hidden_size": 64,
}  # fmt: skip
SHAPE = VisionShape(32, 48, 2, 4, channels=3, patch=14, frames=2, merged=2, output=64)


@pytest.mark.parametrize(
    "given, channels",
    [({}, 3), ({"in_channels": 1}, 1), ({"in_chans": 4}, 4), ({"in_channels": 1, "in_chans": 4}, 1)],
)
def test_channels_have_two_names(given, channels):
    """Published files use in_chans, and transformers 4.52 saves in_channels."""
    shape = VisionShape.from_config(VALUES | given)
    assert (shape, shape.merger) == (VisionShape(32, 48, 2, 4, channels, 14, 2, 2, 64), 128)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_together_have_each_element(tp):
    """Sharded tensors are covered once, and replicated ones once per rank, such as biases of row-parallel layers."""
    shapes, held = hf_shapes(SHAPE), Counter()
    for rank in range(tp):
        for shard in vllm_ascend(SHAPE, tp, rank):
            held[shard.hf_name] += prod(shard.extents)
    cut = (".qkv.weight", ".qkv.bias", "gate_proj.weight", "gate_proj.bias", "up_proj.weight", "up_proj.bias",
           "mlp.0.weight", "mlp.0.bias", "attn.proj.weight", "down_proj.weight", "mlp.2.weight")  # fmt: skip
    assert held == {name: prod(dims) * (1 if name.endswith(cut) else tp) for name, dims in shapes.items()}
    assert shapes["visual.merger.mlp.2.weight"] == (64, 128) and shapes["visual.merger.mlp.0.weight"] == (128, 128)
    assert shapes["visual.patch_embed.proj.weight"] == (32, 3, 2, 14, 14)
