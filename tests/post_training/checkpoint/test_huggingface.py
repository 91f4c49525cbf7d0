"""The tensors that a HuggingFace folder must have, and those that it may have beside them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.huggingface import HuggingfaceFolder, check_tensors, open_huggingface
from post_training.checkpoint.regions import StoredTensor

SHAPES = {
    "model.embed_tokens.weight": (96, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.layers.1.eh_proj.weight": (8, 16),
}


def folder(more=(), without=(), **shapes):
    """Make a folder with the tensors of `SHAPES` except `without`, and vectors `more`; `shapes` override shapes."""
    dims = {**SHAPES, **dict.fromkeys(more, (4,)), **shapes}
    tensors = {
        name: StoredTensor(Path("model.safetensors"), 0, torch.bfloat16, shape)
        for name, shape in dims.items()
        if name not in without
    }
    return HuggingfaceFolder(Path("folder"), {}, tensors)


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["lm_head.weight"],
        ["model.layers.0.mlp.down_proj.weight_scale_inv"],
        ["model.layers.0.self_attn.rotary_emb.inv_freq"],
        ["model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight"],
    ],
)
def test_tensors_without_a_use_may_be_there(more):
    check_tensors(folder(more), SHAPES, ignored=("lm_head.weight",))


@pytest.mark.parametrize(
    "more",
    [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.enorm.weight",
        "model.layers.2.enorm.weight",
        "lm_head.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq.weight",
        "other_scale_inv",
    ],
)
def test_tensor_without_a_place_is_named(more):
    with pytest.raises(CheckpointError, match=f"^model.safetensors: tensor {more} is not part of the model"):
        check_tensors(folder([more]), SHAPES)


@pytest.mark.parametrize("shape", [(12, 8), (8, 13), (96,), (8, 12, 1)])
def test_shape_that_config_does_not_mean_is_named(shape):
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(CheckpointError) as raised:
        check_tensors(folder(**{name: shape}), SHAPES)
    said = f"model.safetensors: tensor {name} has shape {shape}, but config.json implies (8, 12)"
    assert str(raised.value) == said


def test_missing_tensors_are_counted():
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.down_proj.weight is missing \(2 of 3 are\)"):
        check_tensors(folder(without=list(SHAPES)[1:]), SHAPES)


@pytest.mark.parametrize(
    "more, dtype, rejected",
    [
        ("w_scale_inv", torch.float8_e4m3fn, ""),
        ("v_scale_inv", torch.bfloat16, "model.safetensors: the scale v_scale_inv has no weight"),
    ],
)
def test_scale_without_its_weight_is_named(tmp_path, more, dtype, rejected):
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.ones(2, 2).to(dtype), more: torch.ones(1, 1)}, tmp_path / "model.safetensors")
    if not rejected:
        assert set(open_huggingface(tmp_path).tensors) == {"w", more}
        return
    with pytest.raises(CheckpointError, match=rejected):
        open_huggingface(tmp_path)


@pytest.mark.parametrize(
    "quantisation, taken",
    [
        (None, True),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "fp8"}, True),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, False),
        ({"quant_method": "fp8", "weight_block_size": [1, 128]}, False),
        ({"quant_method": "awq", "weight_block_size": [128, 128]}, False),
    ],
)
def test_other_quantisation_is_rejected(tmp_path, quantisation, taken):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantisation}))
    save_file({"w": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    if taken:
        assert set(open_huggingface(tmp_path).tensors) == {"w"}
        return
    with pytest.raises(CheckpointError, match="is not FP8 with blocks of 128 x 128"):
        open_huggingface(tmp_path)
