"""Compare vLLM's Qwen2.5-VL vision tower, filled by vLLM's own loaders on two ranks, with the table's shards."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from unittest import mock

import verl_patches.prelude_patch  # noqa: F401  (before every upstream package)

# isort: split
import torch
from transformers import Qwen2_5_VLConfig
from vllm.distributed import parallel_state
from vllm.model_executor.models import qwen2_5_vl

from post_training.layouts.layout import RolloutPlacement
from post_training.models.families import table_for

RANKS = 2
VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 48}
VISION |= {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
CONFIG = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_size": 48,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "vision_config": VISION,
}  # fmt: skip


@contextmanager
def rank_of_two(rank: int) -> Iterator[None]:
    """Make vLLM believe it runs as `rank` of two, without other processes and without computing anything."""
    group = SimpleNamespace(world_size=RANKS, rank_in_group=rank)
    with (
        mock.patch.object(parallel_state, "_TP", group),
        mock.patch.object(qwen2_5_vl, "get_vit_attn_backend", lambda **_: qwen2_5_vl._Backend.TORCH_SDPA),
    ):
        yield


def main() -> None:
    table = table_for(CONFIG)
    tensors = {name: torch.randn(shape) for name, shape in table.shapes.items() if name.startswith("visual.")}
    for rank in range(RANKS):
        with rank_of_two(rank):
            built = qwen2_5_vl.Qwen2_5_VisionTransformer(Qwen2_5_VLConfig(vision_config=VISION).vision_config)
            built.load_weights((name.removeprefix("visual."), value) for name, value in tensors.items())
        live = {f"visual.{name}": weight for name, weight in built.named_parameters()}
        shards = [each for each in table.vllm_ascend(RolloutPlacement(tp=RANKS), rank) if each.hf_name in tensors]
        for shard in shards:
            bounds = tuple(slice(*interval) for interval in shard.bounds)
            assert torch.equal(shard.locate(live), tensors[shard.hf_name][bounds]), shard.hf_name
        assert sum(prod(shard.extents) for shard in shards) == sum(weight.numel() for weight in live.values())
    print(f"equal at {RANKS} ranks")


if __name__ == "__main__":
    main()
