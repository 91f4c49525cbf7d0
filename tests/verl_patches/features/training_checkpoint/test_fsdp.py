"""A training on FSDP resumes bit for bit, and its checkpoint is like any other, for any number of ranks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, Qwen2Config

from post_training.checkpoint.conversion import run as run_conversion
from post_training.checkpoint.training_export import trained_to_huggingface
from post_training.checkpoint.training_files import open_training_files
from post_training.layouts.layout import TrainPlacement
from post_training.models.families import table_for
from tests.forked import PYTORCH
from tests.post_training.layouts.grouped_query_reference import SMALL
from tests.ranks import run_ranks
from tests.verl_patches.features.training_checkpoint.ranks import (
    STATES,
    differences,
    full_states,
    rank_of,
    save_all,
    whole_states,
)
from verl_patches.features.training_checkpoint.restoring import load_training

RANKS = 2
BEFORE = TrainPlacement(2, 1, 1, 2, (3,))
AFTER = (TrainPlacement(2, 3, 1, 1, (1, 1, 1)), TrainPlacement(3, 1, 1, 2, (3,), vocab_padded=102))


@pytest.fixture(scope="module", params=["fsdp", "fsdp2"])
def run(request, tmp_path_factory) -> tuple[Path, list[dict]]:
    """Return the folder of all checkpoints, and the results of each rank."""
    folder = tmp_path_factory.mktemp(request.param)
    write_models(folder)
    (folder / "strategy").write_text(request.param)
    (folder / "megatron").mkdir()
    save_all(folder / "megatron", "qwen2", BEFORE, full_states("qwen2"))
    run_ranks("tests.verl_patches.features.training_checkpoint.fsdp_program", RANKS, folder, 300, imported=PYTORCH)
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def write_models(folder: Path) -> None:
    """Write models with random weights: `model`, `tied`, and `critic`, which is made as in verl."""
    for name, tied in (("model", False), ("tied", True)):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(configuration(tied)).save_pretrained(folder / name)
    critic = configuration(False)
    critic.update({"num_labels": 1, "classifier_dropout": 0.0, "hidden_dropout": "0"})
    AutoModelForTokenClassification.from_config(critic).save_pretrained(folder / "critic")


def configuration(tied: bool) -> Qwen2Config:
    """Return the configuration of a model with the reference's shapes."""
    return Qwen2Config(
        vocab_size=SMALL.vocab, hidden_size=SMALL.hidden, intermediate_size=SMALL.intermediate,
        num_hidden_layers=SMALL.layers, num_attention_heads=SMALL.heads, num_key_value_heads=SMALL.kv_heads,
        head_dim=SMALL.head_dim, tie_word_embeddings=tied, torch_dtype=torch.float32,
    )  # fmt: skip


def states(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return whole_states(folder / "float32" / name, table_for(AutoConfig.from_pretrained(folder / "model")).shapes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_steps_after_a_resume_are_those_of_the_unbroken_run(run, dtype):
    for rank in run[1]:
        found = rank[dtype]
        assert found["resumed"] == {name: found[name] for name in ("losses", "digest")}
        assert found["losses"][0] != found["losses"][1] and len(found["digest"]) > 30


def test_critic_continues_as_the_unbroken_run(run):
    folder, measured = run
    for rank in measured:
        found = rank["critic"]
        assert found["resumed"] == {name: found[name] for name in ("losses", "digest")}
        assert found["no averages"]["digest"] != found["digest"] and found["losses"][0] != found["losses"][1]
    written = {name for rank in measured for name in rank["critic"]["digest"]}
    assert any("score.weight" in name for name in written) and any("score.bias" in name for name in written)
    assert not any("lm_head" in name for name in written)


@pytest.mark.parametrize("fault", ["no steps", "rate from the beginning"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_faulty_resume_detected(run, dtype, fault):
    for rank in run[1]:
        assert rank[dtype][fault]["digest"] != rank[dtype]["digest"]


def test_another_number_of_ranks_has_the_same_elements_and_the_same_loss(run):
    folder, measured = run
    two = states(folder, "two")
    assert {name.split("/")[0] for name in two} == set(STATES)
    for name in ("one0", "one1", "again"):
        found = states(folder, name)
        assert found.keys() == two.keys() and all(torch.equal(found[entry], two[entry]) for entry in two), name
    assert len(list((folder / "float32" / "one0").glob("rank-*"))) == 1
    expected = measured[0]["float32"]["losses"][0]
    assert measured[0]["ranks"]["again"][0] == expected
    assert measured[0]["ranks"]["alone"][0] == pytest.approx(expected, rel=1e-6)


def test_the_files_are_those_of_the_models_family(run):
    """Names and shapes are those that Megatron's layouts read and write; every element is stored once."""
    folder, _ = run
    shapes = table_for(AutoConfig.from_pretrained(folder / "model")).shapes
    files = open_training_files(folder / "float32" / "two", shapes)
    elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    for state in STATES:
        stored = sum(
            torch.Size(fragment.region.tensor.shape).numel()
            for tensor in files.sources[state].tensors.values()
            for fragment in tensor.fragments
        )
        assert stored == elements


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("placement", AFTER)
def test_megatron_continues_from_it(run, placement):
    folder, _ = run
    full = {state: {} for state in STATES}
    for entry, tensor in states(folder, "two").items():
        state, _, name = entry.partition("/")
        full[state][name] = tensor
    for rank in range(placement.world_size):
        made = rank_of("qwen2", placement, rank)
        load_training(folder / "float32" / "two", made)
        assert not differences(made, rank_of("qwen2", placement, rank, full))


def test_it_continues_from_megatrons(run):
    found, full = states(run[0], "from_megatron"), full_states("qwen2")
    assert len(found) == sum(map(len, full.values()))
    assert all(torch.equal(found[f"{state}/{name}"], full[state][name]) for state in full for name in full[state])


def test_a_tied_weight_is_saved_once(run):
    folder, _ = run
    shapes = table_for(AutoConfig.from_pretrained(folder / "tied")).shapes
    assert "lm_head.weight" not in shapes
    assert {name.split("/", 1)[1] for name in whole_states(folder / "float32" / "tied", shapes)} == set(shapes)


def test_an_export_is_the_trained_model(run, tmp_path):
    folder, _ = run
    conversion = trained_to_huggingface(folder / "float32" / "two", folder / "model", tmp_path / "hf", 1 << 30, {})
    run_conversion(conversion, 1, lambda _: None)
    exported, master = load_file(next((tmp_path / "hf").glob("*.safetensors"))), states(folder, "two")
    assert exported.keys() == load_file(folder / "model" / "model.safetensors").keys()
    assert all(torch.equal(value, master[f"master/{name}"]) for name, value in exported.items())
