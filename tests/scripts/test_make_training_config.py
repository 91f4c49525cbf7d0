"""scripts/make_training_config.py: makes the config.json for training in bfloat16, for any published model."""

import json

import pytest
from transformers import AutoConfig, DeepseekV3Config

from post_training.models.training_config import training_config
from tests.post_training.models.published_configs import PUBLISHED_CONFIGS
from tests.scripts.cluster_files import ROOT, load_script
from verl_patches.trainer.configuration_checks import ConfigurationError, check_configuration
from verl_patches.trainer.main_ppo import compose

PUBLISHED = ROOT / "tests" / "post_training" / "models" / "deepseek_v3_published_config.json"
SHIPPED = ROOT / "verl_patches" / "config.json"
main = load_script("scripts/make_training_config.py").main
JOB = "deepseek_v3_256die_true_weight"


def test_shipped_config_is_made_of_the_published_one(tmp_path):
    assert main([str(PUBLISHED), "--output", str(tmp_path / "config.json")]) == 0
    assert (tmp_path / "config.json").read_bytes() == SHIPPED.read_bytes()
    before, after = json.loads(PUBLISHED.read_text()), json.loads(SHIPPED.read_text())
    assert before.keys() - after.keys() == {"quantization_config"} and after.keys() <= before.keys()
    changed = {name for name, value in after.items() if value != before[name]}
    assert changed == {"num_nextn_predict_layers"} and after["num_nextn_predict_layers"] == 0


def test_published_values_are_those_of_transformers():
    """transformers' defaults for this architecture are DeepSeek-V3's values."""
    read, defaults = AutoConfig.from_pretrained(SHIPPED.parent), DeepseekV3Config()
    names = [name for name in json.loads(SHIPPED.read_text()) if hasattr(defaults, name)]
    stated = {"architectures", "auto_map", "bos_token_id", "max_position_embeddings", "rope_scaling", "torch_dtype"}
    differing = {name for name in names if getattr(read, name) != getattr(defaults, name)}
    assert isinstance(read, DeepseekV3Config) and differing <= stated | {"transformers_version"}
    assert PUBLISHED_CONFIGS["deepseek-ai/DeepSeek-V3"].items() <= json.loads(PUBLISHED.read_text()).items()


def test_shipped_config_is_one_that_the_job_trains():
    config = compose(JOB, ["actor_rollout_ref.model.path=/weights", "trainer.nnodes=16", "trainer.n_gpus_per_node=16"])
    check_configuration(config, json.loads(SHIPPED.read_text()))
    with pytest.raises(ConfigurationError, match="quantization_config|num_nextn_predict_layers"):
        check_configuration(config, json.loads(PUBLISHED.read_text()))


@pytest.mark.parametrize("name", PUBLISHED_CONFIGS)
def test_any_published_config_loses_two_things(name):
    published = PUBLISHED_CONFIGS[name]
    made = training_config(published)
    dropped = {"quantization_config"} & published.keys()
    assert made.keys() == published.keys() - dropped and training_config(made) == made
    assert all(made[each] == published[each] for each in made if each != "num_nextn_predict_layers")
    assert not made.get("num_nextn_predict_layers")


def test_text_of_a_model_with_images_is_treated_alike():
    text = {"model_type": "glm4v_moe_text", "num_nextn_predict_layers": 1, "quantization_config": {"a": 1}}
    made = training_config({"text_config": text, "vision_config": {"depth": 24}})
    assert made["text_config"] == {"model_type": "glm4v_moe_text", "num_nextn_predict_layers": 0}
    assert made["vision_config"] == {"depth": 24}


def test_published_folder_is_changed_in_place(tmp_path, capsys):
    (tmp_path / "config.json").write_text(PUBLISHED.read_text())
    assert main([str(tmp_path), "--output", str(tmp_path / "config.json")]) == 0
    assert (tmp_path / "config.json").read_text() == SHIPPED.read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert main([str(tmp_path), "--output", str(tmp_path / "config.json")]) == 0
    assert "as published" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "says"), [(None, "Pass the config.json"), ("[1]", "Pass the"), ("{", "Pass the")])
def test_unreadable_published_config_rejected(tmp_path, capsys, text, says):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert main([str(tmp_path / "config.json"), "--output", str(tmp_path / "made.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and says in said and len(said.splitlines()) == 1
    assert not (tmp_path / "made.json").exists()
