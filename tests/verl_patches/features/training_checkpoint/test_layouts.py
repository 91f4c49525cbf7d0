"""Checkpoints of one layout load in another: weights, float32 weights and averages are bit-identical."""

import itertools
import json

import pytest
import torch

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.safetensors_files import read_header
from post_training.checkpoint.training_rank import common_steps
from post_training.layouts.layout import TrainPlacement
from tests.verl_patches.features.training_checkpoint.ranks import (
    MODELS,
    ONE,
    STATES,
    differences,
    full_states,
    rank_of,
    save_all,
)
from verl_patches.features.training_checkpoint.restoring import load_training
from verl_patches.features.training_checkpoint.saving import entries_of

pytestmark = pytest.mark.usefixtures("alone")
PLACEMENTS = {
    "one": ONE,
    "tp2": TrainPlacement(2, 1, 1, 1, (3,)),
    "pp3": TrainPlacement(1, 3, 1, 1, (1, 1, 1)),
    "dp3": TrainPlacement(1, 1, 1, 3, (3,)),
    "tp2 pp2 tp_extend": TrainPlacement(2, 2, 1, 1, (2, 1)),
    "tp2 ep2 dp2": TrainPlacement(2, 1, 2, 2, (3,), moe_tp_extend_ep=False),
    "tp2 pp2 ep2 dp2 tp_extend": TrainPlacement(2, 2, 2, 2, (1, 2)),
    "tp3 dp2 padded": TrainPlacement(3, 1, 1, 2, (3,), vocab_padded=102),
}
PAIRS = [("deepseek_v3", *pair) for pair in itertools.permutations(PLACEMENTS, 2) if "one" not in pair]
PAIRS += [(model, "tp2", "dp3") for model in ("qwen2", "qwen2_tied", "qwen3", "qwen3_moe")]
PAIRS += [(model, "tp3 dp2 padded", "pp3") for model in ("qwen2", "qwen2_tied", "qwen3", "qwen3_moe")]
PAIRS += [("qwen3_moe", "tp2 ep2 dp2", "tp2 pp2 ep2 dp2 tp_extend")]
PAIRS += [("qwen2_tied", "pp3", "tp2"), ("deepseek_v3", "one", "one")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that gives a checkpoint's folder, writing each checkpoint once."""
    made = {}

    def folder(model, placement):
        if (model, placement) not in made:
            place = tmp_path_factory.mktemp("saved")
            made[model, placement] = save_all(place, model, PLACEMENTS[placement], full_states(model))
        return made[model, placement]

    return folder


# Other dtypes have other optimizers, which does not change where the shards are: a quarter of the pairs is enough.
CASES = [*((*pair, torch.bfloat16) for pair in PAIRS), *((*pair, torch.float32) for pair in PAIRS[::4])]


@pytest.mark.parametrize(("model", "before", "after", "dtype"), CASES)
def test_any_layout_loads_any_checkpoint(saved, model, before, after, dtype):
    full, placement = full_states(model), PLACEMENTS[after]
    for rank in range(placement.world_size):
        forms = ("torch", "apex", "swap") if dtype == torch.bfloat16 else ("torch", "apex")
        made = rank_of(model, placement, rank, dtype=dtype, form=forms[rank % len(forms)])
        load_training(saved(model, before), made)
        assert common_steps(made.optimizer_shards) == 2
        assert not differences(made, rank_of(model, placement, rank, full, dtype=dtype))


@pytest.mark.parametrize("steps", [2, 0])
def test_an_optimizer_that_swaps_to_the_host_is_saved_from_there_and_loaded_into_it(tmp_path, steps):
    full, placement = full_states("qwen2"), PLACEMENTS["tp2"]
    save_all(tmp_path, "qwen2", placement, full, form="swap", steps=steps)
    made = rank_of("qwen2", ONE, 0, form="swap", steps=5, full={name: full["exp_avg"] for name in STATES})
    load_training(tmp_path, made)
    assert common_steps(made.optimizer_shards) == steps and all(
        shard.main.untyped_storage().nbytes() == 0 for shard in made.optimizer_shards
    )
    if steps:
        assert not differences(made, rank_of("qwen2", ONE, 0, full))
    else:
        assert all(not shard.moments() and not shard.away["exp_avg"].any() for shard in made.optimizer_shards)


def test_an_optimizer_whose_memory_is_away_and_that_says_not_where_rejected(tmp_path):
    made = rank_of("qwen2", ONE, 0, full_states("qwen2"), form="swap")
    for part in made.optimizer.chained_optimizers:
        part.param_to_cpu_states_map = {}
    with pytest.raises(CheckpointError, match="is not in memory. Set trainer.save_freq=-1"):
        entries_of(made)


def test_the_comparison_sees_one_wrong_element(saved):
    made = rank_of("deepseek_v3", ONE, 0)
    load_training(saved("deepseek_v3", "tp2"), made)
    made.optimizer_shards[5].main[0] += 1e-6
    expected = rank_of("deepseek_v3", ONE, 0, full_states("deepseek_v3"))
    assert differences(made, expected) == [f"master of {made.optimizer_shards[5].local}"]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_nothing_is_written_twice_and_nothing_is_left_out(saved, placement):
    table = MODELS["deepseek_v3"][0]
    stored = {state: 0 for state in (*STATES, "weight")}
    for file in saved("deepseek_v3", placement).glob("*.safetensors"):
        for name, tensor in read_header(file).items():
            stored[name.split("/")[0]] += torch.Size(tensor.shape).numel()
    biases = sum(torch.Size(dims).numel() for name, dims in table.shapes.items() if name.endswith("correction_bias"))
    whole = sum(torch.Size(dims).numel() for dims in table.shapes.values()) - biases
    assert stored == dict.fromkeys(STATES, whole) | {"weight": biases}


def test_replicas_share_the_writing(saved):
    """Every tensor-parallel rank has the layer norms, but no single rank writes them all."""
    norms = [
        {name for name in read_header(file) if "layernorm" in name}
        for file in sorted(saved("deepseek_v3", "tp2").glob("*.safetensors"))
    ]
    assert len(norms) == 2 and all(norms) and not norms[0] & norms[1]


def test_a_training_without_an_update_is_saved_too(tmp_path):
    """There are no averages yet, neither before the save nor after the load."""
    full = full_states("qwen2")
    save_all(tmp_path, "qwen2", ONE, {"master": full["master"]} | {s: full[s] for s in STATES[1:]}, steps=0)
    made = rank_of("qwen2", ONE, 0)
    load_training(tmp_path, made)
    assert common_steps(made.optimizer_shards) == 0 and all(not shard.state for shard in made.optimizer_shards)


def _cut(folder):
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


def _flip(folder):
    file = next(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)


def _lose(folder):
    sorted(folder.glob("*.safetensors"))[1].unlink()


def _unfinished(folder):
    (folder / "manifest.json").unlink()


def _of_other_steps(folder):
    """Replace a file by that of another step, with a correct hash in the manifest."""
    from post_training.checkpoint.durable import hash_file

    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes().replace(b'"optimizer_steps":"2"', b'"optimizer_steps":"3"'))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][file.name]["sha256"] = hash_file(file, lambda _: None).sha256
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_cut, r"bytes instead of \d+. Resume from an older"),
        (_flip, "has SHA-256 .* the file has changed"),
        (_lose, "cannot be read .No such file.*. Resume from an older"),
        (_unfinished, "not a complete checkpoint, manifest.json is missing or unfinished"),
        (_of_other_steps, "disagree on optimizer_steps"),
    ],
)
def test_a_damaged_checkpoint_rejected_before_anything_is_written(tmp_path, damage, sentence):
    folder = save_all(tmp_path, "deepseek_v3", PLACEMENTS["tp2"], full_states("deepseek_v3"))
    damage(folder)
    made = rank_of("deepseek_v3", ONE, 0)
    with pytest.raises(CheckpointError, match=sentence) as rejection:
        load_training(folder, made)
    assert "\n" not in str(rejection.value)
    assert all(tensor.isnan().all() for tensor in made.tensors.values()) and not any(
        s.state for s in made.optimizer_shards
    )


def test_another_models_checkpoint_rejected(saved):
    with pytest.raises(CheckpointError, match="is not a tensor of this model. Resume with the saved model"):
        load_training(saved("qwen2", "tp2"), rank_of("deepseek_v3", ONE, 0))
    with pytest.raises(CheckpointError, match="no file has any part of lm_head.weight|is not a tensor of this model"):
        load_training(saved("qwen2_tied", "tp2"), rank_of("qwen2", ONE, 0))
