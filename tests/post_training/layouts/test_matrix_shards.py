"""Tensors with more than two dimensions are transferred as matrices: the same memory, and only whole rows."""

import pytest
import torch

from post_training.layouts.layout import LocalView, RolloutPlacement, Shard, matrix_shards, matrix_table
from post_training.models.families import table_for
from tests.post_training.models.published_configs import PUBLISHED_CONFIGS

SHAPES = {"conv": (8, 3, 2), "matrix": (8, 3)}


def test_rows_of_a_convolution_are_rows_of_a_matrix():
    weight = torch.arange(24.0).view(4, 3, 2)
    conv, matrix = Shard("conv", ((4, 8), (0, 3), (0, 2)), "own"), Shard("matrix", ((0, 8), (0, 3)), "other")
    placed, other = matrix_shards([conv, matrix], SHAPES)
    assert other is matrix and placed.bounds == ((4, 8), (0, 6))
    found = placed.locate({"own": weight})
    assert torch.equal(found, weight.view(4, 6)) and found.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize(
    "shard",
    [
        Shard("conv", ((0, 4), (0, 2), (0, 2)), "own"),
        Shard("conv", ((0, 4), (1, 3), (0, 2)), "own"),
        Shard("conv", ((0, 4), (0, 3), (0, 2)), "own", LocalView(index=((0, 4),))),
    ],
)
def test_part_of_a_row_rejected(shard):
    with pytest.raises(ValueError, match="conv: only whole rows of a tensor with 3 dimensions can be moved"):
        matrix_shards([shard], SHAPES)


def test_layouts_of_a_vision_language_model_are_matrices():
    config = PUBLISHED_CONFIGS["Qwen/Qwen2.5-VL-3B-Instruct"]
    table = matrix_table(table_for(config))
    assert table.shapes["visual.patch_embed.proj.weight"] == (1280, 1176)
    assert max(len(shape) for shape in table.shapes.values()) == 2
    for rank in range(2):
        assert max(len(shard.bounds) for shard in table.vllm_ascend(RolloutPlacement(2), rank)) == 2


def test_layouts_of_a_text_model_stay():
    text = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 8,
        "max_position_embeddings": 8,
    }  # fmt: skip
    table = table_for(text)
    assert matrix_table(table) is table
