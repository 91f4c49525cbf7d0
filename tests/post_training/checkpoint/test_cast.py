"""The cast matches a naive one with whole files and torch operations, and the defining formula."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, DeepseekV3ForCausalLM

from post_training.checkpoint.cast import carried_files
from post_training.checkpoint.files import CheckpointError
from scripts.fp8_cast_bf16 import parse_arguments, plan
from tests.post_training.checkpoint.reference import dequantised, load_folder
from tests.post_training.checkpoint.synthetic import Synthetic, small_config
from tests.post_training.checkpoint.tools import cast


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return Synthetic(small_config(num_nextn_predict_layers=1)).write(tmp_path_factory.mktemp("fp8") / "source")


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory):
    output = tmp_path_factory.mktemp("bf16") / "output"
    assert cast(checkpoint, output) == 0
    return output


def test_every_weight_equals_the_formula(checkpoint, converted):
    assert_same(load_folder(converted), dequantised(load_folder(checkpoint)))


def test_random_codes_and_a_model_in_one_file(tmp_path):
    config = small_config(hidden_size=300, intermediate_size=257, num_hidden_layers=2)
    source = Synthetic(config, files=1, random_codes=True).write(tmp_path / "source")
    assert cast(source, tmp_path / "output") == 0
    assert_same(load_folder(tmp_path / "output"), dequantised(load_folder(source)))


def test_index_lists_exactly_the_tensors_and_no_scale(converted):
    index = json.loads((converted / "model.safetensors.index.json").read_text())
    found = {name: file.name for file in converted.glob("*.safetensors") for name in load_file(file)}
    assert index["weight_map"] == found
    assert not any(name.endswith("_scale_inv") for name in found)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in load_folder(converted).values())


def test_configuration_loses_its_quantisation_and_other_files_are_carried_over(checkpoint, converted):
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (checkpoint, converted))
    assert "quantization_config" in before and "quantization_config" not in after
    kept = {key: value for key, value in before.items() if key != "quantization_config"}
    assert after == kept | {"torch_dtype": "bfloat16"}
    for name in ("tokenizer.json", "generation_config.json"):
        assert (converted / name).read_bytes() == (checkpoint / name).read_bytes()


def test_configuration_names_the_type_of_the_weights(tmp_path):
    """config.json of some FP8 folders names the dtype of their training, or none."""
    source = Synthetic(small_config(num_hidden_layers=2), files=1).write(tmp_path / "source")
    values = json.loads((source / "config.json").read_text())
    for given in ({"torch_dtype": "float32"}, {}):
        rest = {key: value for key, value in values.items() if key != "torch_dtype"}
        (source / "config.json").write_text(json.dumps(rest | given))
        arguments = ["--input-fp8-hf-path", str(source), "--output-bf16-hf-path", str(tmp_path / "output")]
        (written,) = (file for file in plan(parse_arguments(arguments)).files if file.path == "config.json")
        del rest["quantization_config"]
        assert json.loads(written.text) == rest | {"torch_dtype": "bfloat16"}


def test_carried_is_all_but_weights_and_own_files(tmp_path):
    carried = ["LICENSE", "README.md", "generation_config.json", "modeling_deepseek.py", "tokenizer.json"]
    own = ["config.json", "manifest.json", "model.safetensors.index.json"]
    weights = ["model-00001-of-000163.safetensors", "pytorch_model.bin", "consolidated.00.pth", "training_args.pt"]
    for name in (*carried, *own, *weights, ".gitattributes", ".tokenizer.json.partial"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "results.json").mkdir()
    assert carried_files(tmp_path) == [tmp_path / name for name in carried]


def test_transformers_loads_the_output(converted):
    model, report = DeepseekV3ForCausalLM.from_pretrained(converted, output_loading_info=True, torch_dtype="auto")
    assert not report["missing_keys"] and not report["mismatched_keys"]
    weights = load_folder(converted)
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])
    assert AutoConfig.from_pretrained(converted).to_dict().get("quantization_config") is None


def test_the_same_command_again_verifies_and_writes_nothing(checkpoint, converted, capsys):
    before = {path: path.stat().st_mtime_ns for path in converted.iterdir()}
    assert cast(checkpoint, converted) == 0
    assert "0 files (0 bytes) written, 6 verified" in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in converted.iterdir()}
    assert {path for path in before if before[path] != after[path]} <= {converted / "manifest.json"}


def test_a_checkpoint_without_fp8_rejected(converted, tmp_path):
    with pytest.raises(CheckpointError, match="nothing to cast"):
        plan(parse_arguments(["--input-fp8-hf-path", str(converted), "--output-bf16-hf-path", str(tmp_path)]))
