"""Loading a HuggingFace folder into ranks, and the sentence a user gets when the folder does not fit."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file

from tests.verl_patches.features.reshard.placements import layout_pairs
from tests.verl_patches.features.reshard.reference import SMALL, full_weights, megatron_state, rollout_state
from verl_patches.features.reshard.deepseek_v3 import (
    DeepseekV3Shape,
    canonical_shapes,
    ignored_in_files,
    megatron,
    vllm_ascend,
)
from verl_patches.features.reshard.files import CheckpointError, load_from_huggingface
from verl_patches.features.reshard.layout import RolloutPlacement, TrainPlacement

FULL = full_weights(SMALL, torch.bfloat16)
SHAPES = canonical_shapes(SMALL)
SINGLE = TrainPlacement(tp=1, pp=1, ep=1, dp=1, num_layer_list=(3,))


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 3) -> None:
    names = sorted(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number::shards]
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_shards(folder, FULL)
    return folder


def emptied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, torch.nan) for name, value in state.items()}


def load(folder: Path, shape: DeepseekV3Shape = SMALL) -> int:
    target = emptied(megatron_state(FULL, SMALL, SINGLE, 0))
    return load_from_huggingface(
        folder, target, megatron(SMALL, SINGLE, 0), canonical_shapes(shape), ignored_in_files(shape)
    )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout_pairs())
def test_every_rank_loads_its_boxes(checkpoint: Path, pair: tuple[TrainPlacement, RolloutPlacement]) -> None:
    train, rollout = pair
    for rank in range(train.world_size):
        for pieces, expected in (
            (megatron(SMALL, train, rank), megatron_state(FULL, SMALL, train, rank)),
            (vllm_ascend(SMALL, rollout, rank), rollout_state(FULL, SMALL, rollout, rank)),
        ):
            target = emptied(expected)
            load_from_huggingface(checkpoint, target, pieces, SHAPES)
            assert all(torch.equal(target[name], value) for name, value in expected.items())


def test_a_rank_reads_only_its_share(checkpoint: Path) -> None:
    total = sum(value.numel() * 2 for value in FULL.values())
    assert load(checkpoint) == total
    quarter = TrainPlacement(tp=4, pp=1, ep=1, dp=1, num_layer_list=(3,))
    target = emptied(megatron_state(FULL, SMALL, quarter, 1))
    pieces = megatron(SMALL, quarter, 1)
    assert load_from_huggingface(checkpoint, target, pieces, SHAPES) == sum(2 * v.numel() for v in target.values())


def test_values_are_converted_to_the_model_type(checkpoint: Path) -> None:
    target = {name: value.float() for name, value in emptied(megatron_state(FULL, SMALL, SINGLE, 0)).items()}
    load_from_huggingface(checkpoint, target, megatron(SMALL, SINGLE, 0), SHAPES)
    assert torch.equal(target["output_layer.weight"], FULL["lm_head.weight"].float())


def test_a_single_file_without_index_is_read(tmp_path: Path) -> None:
    save_file(FULL, tmp_path / "model.safetensors")
    assert load(tmp_path) > 0


NAME = "model.layers.2.mlp.experts.7.up_proj.weight"


def broken(folder: Path, change: str) -> None:
    """Write the checkpoint with one defect."""
    tensors = dict(FULL)
    if change == "missing tensor":
        del tensors[NAME]
    elif change == "unexpected tensor":
        tensors["model.layers.2.self_attn.q_proj.weight"] = torch.zeros(2)
    elif change == "shape":
        tensors[NAME] = tensors[NAME][:, :-1]
    elif change == "scales":
        tensors[NAME + "_scale_inv"] = torch.zeros(1)
    elif change == "float8":
        tensors[NAME] = tensors[NAME].to(torch.float8_e4m3fn)
    write_shards(folder, tensors)
    if change == "missing file":
        (folder / "model-00002-of-00003.safetensors").unlink()
    elif change == "truncated file":
        file = folder / "model-00002-of-00003.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
    elif change == "broken index":
        (folder / "model.safetensors.index.json").write_text("{")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("missing tensor", [NAME, "missing", "config.json"]),
        ("unexpected tensor", ["model.layers.2.self_attn.q_proj.weight", "no place", ".safetensors", "config.json"]),
        ("shape", [NAME, "(24, 7)", "(24, 8)", ".safetensors", "config.json"]),
        ("scales", [NAME + "_scale_inv", "fp8_cast_bf16"]),
        ("float8", [NAME, "F8_E4M3", "fp8_cast_bf16"]),
        ("missing file", ["model-00002-of-00003.safetensors", "missing", "download"]),
        ("truncated file", ["model-00002-of-00003.safetensors", "download"]),
        ("broken index", ["model.safetensors.index.json", "download"]),
    ],
)
def test_a_defect_is_one_clear_sentence(tmp_path: Path, change: str, words: list[str]) -> None:
    broken(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="actor_rollout_ref.model.path"):
        load(tmp_path)


def test_prediction_layers_of_the_real_checkpoint_are_ignored(tmp_path: Path) -> None:
    write_shards(tmp_path, FULL | {"model.layers.3.eh_proj.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="eh_proj"):
        load(tmp_path)
    assert load(tmp_path, DeepseekV3Shape(**{**SMALL.__dict__, "mtp_layers": 1})) > 0
