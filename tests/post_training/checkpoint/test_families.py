"""The weight tools cast and compare families other than DeepSeek-V3, and reject shards of them."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from post_training.models.families import families
from tests.post_training.checkpoint.reference import dequantised, load_folder
from tests.post_training.checkpoint.small_families import CONFIGS, write
from tests.post_training.checkpoint.tools import cast, convert, export, verify


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cast_is_the_formulas_and_transformers_loads_it(name, tmp_path, capsys):
    source, output = write(name, tmp_path / "fp8", fp8=True), tmp_path / "bf16"
    assert cast(source, output) == 0
    found, expected = load_folder(output), dequantised(load_folder(source))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[weight], expected[weight]) for weight in expected)
    _, report = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True, torch_dtype="auto")
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert verify(source, output) == 0 and "equal: " in capsys.readouterr().out
    assert verify(output, write(name, tmp_path / "other", seed=1)) == 1


def test_two_families_are_two_models(tmp_path, capsys):
    assert verify(write("qwen3", tmp_path / "one"), write("qwen2", tmp_path / "other")) == 2
    assert "two different models: lm_head.weight has the shape (96, 160) in" in capsys.readouterr().err


def test_the_copy_of_a_tied_output_layer_is_not_compared(tmp_path):
    one, other = write("qwen2", tmp_path / "one"), write("qwen2", tmp_path / "other")
    tensors = load_folder(other)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, other / "model.safetensors")
    assert verify(one, other) == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_shards_of_a_family_that_has_none_rejected_in_one_sentence(name, tmp_path, capsys):
    folder = write(name, tmp_path / "model")
    family = next(each for each in families() if each.architecture == CONFIGS[name].architectures[0])
    for rejected in (
        lambda: convert(folder, tmp_path / "shards"),
        lambda: export(tmp_path / "model", folder, tmp_path / "export"),
    ):
        assert rejected() == 2
        sentence = capsys.readouterr().err
        assert f"shards are made from DeepSeek-V3, but this model is {family.name}: training reads its" in sentence
        assert sentence.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
