"""The key load_from_hf: the driver rejects an invalid checkpoint in one sentence that names the key and the problem."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from overlay import ConfigurationError
from post_training.models.families import families, find_family
from tests.post_training.checkpoint import small_families
from tests.post_training.checkpoint.synthetic import Synthetic, small_config
from verl_patches.features.direct_loading.feature import DIRECT_LOADING, KEY
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose

CONFIG = small_config(num_nextn_predict_layers=1)
LAYERS = ("actor_rollout_ref.actor.megatron.override_transformer_config.num_layer_list=[2,2]",)


@pytest.fixture(scope="module", params=["fp8", "bf16"])
def folder(request, tmp_path_factory) -> Path:
    """Return a checkpoint's folder, beside one that only describes it: an unquantized config.json, no weights."""
    beside = tmp_path_factory.mktemp(request.param)
    (beside / "description").mkdir()
    described = CONFIG.to_dict() | {"num_nextn_predict_layers": 0}
    (beside / "description" / "config.json").write_text(json.dumps(described))
    return Synthetic(CONFIG, fp8=request.param == "fp8").write(beside / "model")


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    return shutil.copytree(folder.parent, tmp_path / "copy") / "model"


def check(folder, *overrides, model_path=None):
    model_path = model_path or folder.parent / "description"
    return check_configuration(
        compose("rehearsal", [f"{KEY}={folder}", f"actor_rollout_ref.model.path={model_path}", *LAYERS, *overrides])
    )


def rejected(folder, *overrides, model_path=None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check(folder, *overrides, model_path=model_path)
    assert KEY in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_sound_folder_passes(folder):
    settings = check(folder)
    assert settings.load_from_hf == str(folder) and DIRECT_LOADING.is_on(settings)


@pytest.mark.parametrize("name", small_families.CONFIGS)
def test_a_folder_of_each_family_passes(name, tmp_path):
    model = small_families.write(name, tmp_path / "model", fp8=name == "qwen3_moe")
    transformer = "actor_rollout_ref.actor.megatron.override_transformer_config"
    no_experts = "actor_rollout_ref.overlay.rollout.expert_parallel_size=1"
    taken_away = [f"~{transformer}.num_layer_list", f"~{transformer}.moe_tp_extend_ep", no_experts]
    described = small_families.write(name, tmp_path / "described")
    own = find_family(small_families.CONFIGS[name]).megatron
    options = [f"{transformer}.num_layer_list=[1,1]"] if own else taken_away
    path = f"actor_rollout_ref.model.path={described}"
    assert check_configuration(compose("rehearsal", [f"{KEY}={model}", path, *options])).load_from_hf == str(model)


def test_without_the_key_nothing_is_looked_at():
    settings = check_configuration(compose("rehearsal", ["actor_rollout_ref.model.path=/absent"]))
    assert settings.load_from_hf == "" and not DIRECT_LOADING.is_on(settings)


def test_a_value_that_is_no_path_rejected():
    with pytest.raises(ConfigurationError, match=f"{KEY}=.* should be a valid string"):
        check_configuration(compose("rehearsal", [f"{KEY}=[a,b]"]))


def test_missing_folder_and_missing_description(folder, tmp_path):
    assert "is invalid: not a folder" in rejected(tmp_path / "absent")
    assert "config.json of actor_rollout_ref.model.path cannot be read" in rejected(folder, model_path=tmp_path)
    check(folder, model_path="hdfs://somewhere/model")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.actor.load_weight=false", "load_weight=False is invalid: it would ignore"),
        ("actor_rollout_ref.actor.megatron.use_dist_checkpointing=true", "actor.megatron.use_dist_checkpointing=True"),
        ("actor_rollout_ref.ref.megatron.use_dist_checkpointing=true", "ref.megatron.use_dist_checkpointing=True"),
        ("actor_rollout_ref.rollout.load_format=auto", "Set it to dummy_megatron"),
    ],
)
def test_other_ways_of_loading_rejected(folder, override, words):
    assert words in rejected(folder, override)


def rewrite_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def drop(folder: Path, name: str) -> None:
    """Remove a tensor from its file and from the index."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = folder / content["weight_map"].pop(name)
    index.write_text(json.dumps(content))
    save_file({key: value for key, value in load_file(file).items() if key != name}, file)


def test_a_defect_of_the_folder_is_named(copied):
    name = "model.layers.1.input_layernorm.weight"
    drop(copied, name)
    assert f"tensor {name} is missing" in rejected(copied)


def test_a_missing_scale_is_named(copied):
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    if name not in json.loads((copied / "model.safetensors.index.json").read_text())["weight_map"]:
        pytest.skip("only FP8 has scales")
    drop(copied, name)
    assert f"{name} is missing" in rejected(copied)


def test_a_truncated_file_is_named(copied):
    file = sorted(copied.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1])
    assert file.name in rejected(copied) and "truncated" in rejected(copied)


def test_a_quantised_description_rejected(copied, folder):
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    rewrite_config(copied, quantization_config=quantised, num_nextn_predict_layers=0)
    assert "Remove quantization_config and use bf16 weights" in rejected(folder, model_path=copied)


def test_another_architecture_rejected(copied, folder):
    rewrite_config(copied, architectures=["LlamaForCausalLM"])
    known = ", ".join(family.architecture for family in families())
    expected = f"['LlamaForCausalLM'], but only {known} can be loaded this way"
    assert expected in rejected(copied)
    with pytest.raises(ConfigurationError, match="for architecture LlamaForCausalLM. Known are"):
        check(folder, model_path=copied)


def test_another_size_at_the_model_path_rejected(copied, folder):
    rewrite_config(copied, n_routed_experts=4, quantization_config=None, num_nextn_predict_layers=0)
    sentence = rejected(folder, model_path=copied)
    assert "must describe one model" in sentence and "experts" in sentence
