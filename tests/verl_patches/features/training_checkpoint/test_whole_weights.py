"""The weights that a training on FSDP saves are the model's, whole, in a folder that transformers loads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from tests.ranks import run_ranks
from verl_patches.features.training_checkpoint.step_folders import complete_step, read_trainer
from verl_patches.features.training_checkpoint.whole_weights import WEIGHTS_NAME

DATA = Path(__file__).parents[4] / "data" / "arithmetic" / "train.jsonl"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with the model and what was saved of it."""
    folder = tmp_path_factory.mktemp("whole")
    request = CheckpointRequest(DATA, warm_start=None, model_type="qwen2")
    make_checkpoint(request, folder / "model", lambda step, loss: None)
    run_ranks("tests.verl_patches.features.training_checkpoint.whole_weights_program", 2, folder, 300)
    return folder


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_every_tensor_is_the_models_own(saved, strategy):
    expected, found = load_file(saved / "model" / WEIGHTS_NAME), load_file(saved / strategy / WEIGHTS_NAME)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype == torch.bfloat16 and torch.equal(found[name], value), name


def test_transformers_loads_the_folder(saved):
    _, report = AutoModelForCausalLM.from_pretrained(saved / "fsdp", torch_dtype="auto", output_loading_info=True)
    assert not any(report.values())
    assert (saved / "fsdp" / "tokenizer.json").exists() and (saved / "fsdp" / "config.json").exists()


def test_a_step_of_it_is_complete_and_a_changed_one_is_not(saved, tmp_path):
    import shutil

    partial = tmp_path / "global_step_3.partial"
    shutil.copytree(saved / "fsdp", partial / "actor")
    complete_step(tmp_path, 3, {"step": 3})
    assert read_trainer(partial) == {"step": 3}
    (partial / "actor" / WEIGHTS_NAME).write_bytes(b"cut")
    with pytest.raises(ValueError, match="missing, or not of"):
        read_trainer(partial)
