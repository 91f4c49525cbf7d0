"""Loading a HuggingFace folder into ranks, and the errors for a folder that does not fit."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from post_training.checkpoint import loading
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.loading import ignored_prefixes, load_from_huggingface
from post_training.checkpoint.regions import Region
from post_training.checkpoint.safetensors_files import read_header
from post_training.layouts.layout import PADDING, RolloutPlacement, TrainPlacement
from post_training.models.deepseek_v3 import DeepseekV3Shape, hf_shapes, ignored_in_files, megatron, vllm_ascend
from tests.post_training.checkpoint.loading_program import transferred
from tests.post_training.checkpoint.reference import dequantised, load_folder
from tests.post_training.checkpoint.synthetic import Synthetic, small_config
from tests.post_training.layouts.placements import layout_pairs
from tests.post_training.layouts.reference import SMALL, full_weights, megatron_state, rollout_state, same_bits

FULL = full_weights(SMALL, torch.bfloat16)
SHAPES = hf_shapes(SMALL)
# Bytes that a rank may need beyond its shard, for tensor descriptions, buffers and the allocator's slack.
LITTLE = 48 << 20
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
    (folder / "config.json").write_text("{}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_shards(folder, FULL)
    return folder


def emptied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, torch.nan) for name, value in state.items()}


def load(folder: Path, shape: DeepseekV3Shape = SMALL) -> int:
    target = emptied(megatron_state(FULL, SMALL, SINGLE, 0))
    return load_from_huggingface(folder, target, megatron(SMALL, SINGLE, 0), hf_shapes(shape), ignored_in_files(shape))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout_pairs())
def test_every_rank_loads_its_slices(checkpoint: Path, pair: tuple[TrainPlacement, RolloutPlacement]) -> None:
    train, rollout = pair
    for rank in range(train.world_size):
        for shards, expected in (
            (megatron(SMALL, train, rank), megatron_state(FULL, SMALL, train, rank)),
            (vllm_ascend(SMALL, rollout, rank), rollout_state(FULL, SMALL, rollout, rank)),
        ):
            target = emptied(expected)
            read = load_from_huggingface(checkpoint, target, shards, SHAPES)
            assert read == sum(prod(shard.extents) for shard in shards if shard.hf_name != PADDING)
            assert all(torch.equal(target[name], value) for name, value in expected.items())


def test_a_rank_reads_only_its_share(checkpoint: Path) -> None:
    assert load(checkpoint) == sum(value.numel() for value in FULL.values())
    quarter = TrainPlacement(tp=4, pp=1, ep=1, dp=1, num_layer_list=(3,))
    target = emptied(megatron_state(FULL, SMALL, quarter, 1))
    shards = megatron(SMALL, quarter, 1)
    assert load_from_huggingface(checkpoint, target, shards, SHAPES) == sum(v.numel() for v in target.values())


def test_values_are_converted_to_the_model_type(checkpoint: Path) -> None:
    target = {name: value.float() for name, value in emptied(megatron_state(FULL, SMALL, SINGLE, 0)).items()}
    load_from_huggingface(checkpoint, target, megatron(SMALL, SINGLE, 0), SHAPES)
    assert torch.equal(target["output_layer.weight"], FULL["lm_head.weight"].float())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_progress_is_the_bytes_that_are_read(checkpoint: Path, monkeypatch, kind: torch.dtype) -> None:
    """Progress counts bytes in the file's dtype, whatever the model's, in steps of at most the staging memory."""
    monkeypatch.setattr(loading, "STAGING_BYTES", 4096)
    target = {name: value.to(kind) for name, value in emptied(megatron_state(FULL, SMALL, SINGLE, 0)).items()}
    told: list[int] = []
    load_from_huggingface(checkpoint, target, megatron(SMALL, SINGLE, 0), SHAPES, progress=told.append)
    assert sum(told) == sum(value.nbytes for value in FULL.values())
    if kind is torch.float32:
        assert max(told) <= 4096


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("box", [((3, 103), (0, 64)), ((5, 6), (2, 9)), ((0, 7), (0, 5000)), ((4, 1004),)])
def test_slabs_are_as_large_as_the_staging_memory(monkeypatch, itemsize, box):
    monkeypatch.setattr(loading, "STAGING_BYTES", 4096)
    row = itemsize * prod(stop - start for start, stop in box[1:])
    slabs = list(loading._slabs(box, itemsize))
    sizes = [part[0][1] - part[0][0] for part, _ in slabs]
    most = max(4096 // row, 1)
    assert sizes[:-1] == [most] * (len(sizes) - 1) and 0 < sizes[-1] <= most
    assert [part[1:] for part, _ in slabs] == [box[1:]] * len(slabs)
    assert [place for part, rows in slabs for place in range(rows.start, rows.stop)] == list(range(sum(sizes)))
    assert [place for part, _ in slabs for place in range(*part[0])] == list(range(*box[0]))


def test_a_single_file_without_index_is_read(tmp_path: Path) -> None:
    save_file(FULL, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert load(tmp_path) > 0


QUANTISED = Synthetic(
    small_config(
        num_hidden_layers=3,
        vocab_size=100,
        num_attention_heads=24,
        num_key_value_heads=24,
        n_routed_experts=24,
        moe_intermediate_size=144,
        intermediate_size=264,
        kv_lora_rank=132,
        num_nextn_predict_layers=1,
    ),
    random_codes=True,
)


@dataclass(frozen=True)
class Quantised:
    """An FP8 checkpoint whose blocks cross the boundaries of the ranks' slices, and its dequantised weights."""

    folder: Path
    full: dict[str, torch.Tensor] = field(repr=False)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    folder = QUANTISED.write(tmp_path_factory.mktemp("quantised"))
    weights, shapes = dequantised(load_folder(folder)), hf_shapes(QUANTISED.shape)
    return Quantised(folder, {name: weights[name] for name in shapes})


@pytest.mark.slow
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout_pairs((1, 2, 4, 6)))
def test_fp8_slices_are_the_formulas(quantised: Quantised, pair: tuple[TrainPlacement, RolloutPlacement]) -> None:
    full, shape, (train, rollout) = quantised.full, QUANTISED.shape, pair
    shapes, ignored = hf_shapes(shape), ignored_in_files(shape)
    rank = train.world_size - 1
    for shards, expected in (
        (megatron(shape, train, rank), megatron_state(full, shape, train, rank)),
        (vllm_ascend(shape, rollout, rank), rollout_state(full, shape, rollout, rank)),
    ):
        target = emptied(expected)
        load_from_huggingface(quantised.folder, target, shards, shapes, ignored)
        assert all(same_bits(target[name], value) for name, value in expected.items())


def test_a_folder_may_hold_layers_that_no_layout_uses(quantised: Quantised) -> None:
    """The run's own configuration may leave out the layers for multi-token prediction."""
    shape = replace(QUANTISED.shape, mtp_layers=0)
    target = emptied(megatron_state(quantised.full, shape, SINGLE, 0))
    shards, shapes = megatron(shape, SINGLE, 0), hf_shapes(shape)
    for ignored in (ignored_in_files(shape), ignored_prefixes(quantised.folder)):
        assert load_from_huggingface(quantised.folder, target, shards, shapes, ignored) > 0


def test_changed_scale_detected(quantised: Quantised, tmp_path: Path) -> None:
    folder, full = quantised.folder, quantised.full
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    file = next(file for file in folder.glob("*.safetensors") if name in load_file(file))
    stored = load_file(file)
    stored[f"{name}_scale_inv"][-1, -1] *= 2
    shutil.copytree(folder, tmp_path / "changed")
    save_file(stored, tmp_path / "changed" / file.name)
    expected = megatron_state(full, QUANTISED.shape, SINGLE, 0)
    target = emptied(expected)
    shapes, ignored = hf_shapes(QUANTISED.shape), ignored_in_files(QUANTISED.shape)
    load_from_huggingface(tmp_path / "changed", target, megatron(QUANTISED.shape, SINGLE, 0), shapes, ignored)
    different = [name for name, value in expected.items() if not same_bits(target[name], value)]
    assert different == ["decoder.layers.1.self_attention.linear_kvb.weight"]


def test_tensors_of_another_type_are_filled_slab_by_slab(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "STAGING_BYTES", 64)
    expected = megatron_state(FULL, SMALL, SINGLE, 0)
    target = {name: torch.full_like(value, torch.nan, dtype=torch.float64) for name, value in expected.items()}
    load_from_huggingface(checkpoint, target, megatron(SMALL, SINGLE, 0), SHAPES)
    assert all(torch.equal(target[name], value.double()) for name, value in expected.items())


@given(st.integers(0, 50), st.integers(1, 60), st.integers(1, 60), st.integers(1, 4), st.integers(1, 400))
def test_slabs_tile_a_slice_within_the_limit(first: int, rows: int, columns: int, itemsize: int, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "STAGING_BYTES", limit)
        slabs = list(loading._slabs(((first, first + rows), (3, 3 + columns)), itemsize))
    assert [row for _, part in slabs for row in range(part.start, part.stop)] == list(range(rows))
    for ((top, bottom), across), part in slabs:
        assert (top, bottom, across) == (first + part.start, first + part.stop, (3, 3 + columns))
        assert (bottom - top) * columns * itemsize <= limit or bottom - top == 1


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 230 MB of FP8 in one file."""
    config = small_config(
        vocab_size=16000,
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=512,
        n_routed_experts=32,
        q_lora_rank=512,
        kv_lora_rank=256,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    return Synthetic(config, files=1, random_codes=True).write(tmp_path_factory.mktemp("larger"))


def cost(folder: Path, kind: str, rank: int, way: str) -> dict[str, int]:
    program = "tests.post_training.checkpoint.loading_program"
    line = [sys.executable, "-m", program, str(folder), kind, str(rank), way]
    return json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank"), [("train", 0), ("train", 7), ("rollout", 3)])
def test_a_rank_writes_nothing_and_holds_little_more_than_its_shard(larger: Path, kind: str, rank: int) -> None:
    listing = sorted(larger.iterdir())
    found = cost(larger, kind, rank, "slices")
    assert found["written"] == found["to_disk"] == 0 and sorted(larger.iterdir()) == listing
    assert found["growth"] < found["shard"] + LITTLE
    assert found["read"] < sum(file.stat().st_size for file in listing) / 2


@pytest.mark.slow
def test_whole_files_would_be_noticed_in_memory(larger: Path) -> None:
    found = cost(larger, "train", 0, "files")
    assert found["growth"] > found["shard"] + 2 * LITTLE


def test_rows_with_long_gaps_are_read_alone(tmp_path: Path) -> None:
    values = torch.arange(16 * 8192, dtype=torch.float32).view(16, 8192)
    save_file({"weight": values}, tmp_path / "some.safetensors")
    stored = read_header(tmp_path / "some.safetensors")["weight"]
    region = Region.of(stored).part(((2, 9), (100, 2100)))
    counted = transferred()["rchar"]
    read = region.read()
    assert transferred()["rchar"] - counted < 7 * 2000 * 4 + 1024
    assert torch.equal(read, values[2:9, 100:2100])


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
        (
            "unexpected tensor",
            ["model.layers.2.self_attn.q_proj.weight", "not part of the model in config.json", ".safetensors"],
        ),
        ("shape", [NAME, "(24, 7)", "(24, 8)", ".safetensors", "config.json"]),
        ("scales", [NAME + "_scale_inv", "is not FP8", ".safetensors"]),
        ("float8", [NAME, NAME + "_scale_inv is missing", "Download"]),
        ("missing file", ["model-00002-of-00003.safetensors", "No such file"]),
        ("truncated file", ["model-00002-of-00003.safetensors", "Download"]),
        ("broken index", ["model.safetensors.index.json", "not JSON"]),
    ],
)
def test_a_defect_is_one_clear_sentence(tmp_path: Path, change: str, words: list[str]) -> None:
    broken(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_an_empty_folder_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json: cannot be read"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="0 safetensors files"):
        load(tmp_path)


PREDICTION_LAYER = ("enorm", "hnorm", "eh_proj", "mlp.gate")


def test_prediction_layers_of_the_real_checkpoint_are_ignored_also_where_config_json_says_that_there_are_none(tmp_path):
    layer = {f"model.layers.3.{name}.weight": torch.zeros(2) for name in PREDICTION_LAYER}
    write_shards(tmp_path, FULL | layer)
    assert load(tmp_path) > 0
    assert load(tmp_path, DeepseekV3Shape(**{**SMALL.__dict__, "mtp_layers": 1})) > 0


@pytest.mark.parametrize(("layer", "names"), [(3, ("mlp.gate",)), (1, ("eh_proj",)), (1, ("eh_proj", "enorm"))])
def test_layer_is_not_mistaken_for_a_prediction_layer(tmp_path, layer, names):
    """Add a layer beyond config.json's count, or an extra tensor to one of the model's layers."""
    write_shards(tmp_path, FULL | {f"model.layers.{layer}.{name}.weight": torch.zeros(2) for name in names})
    with pytest.raises(CheckpointError, match=f"model.layers.{layer}.*is not part of the model"):
        load(tmp_path)
