"""Qwen2.5-VL's tensors and sizes against transformers' and vLLM's own models, for the published config.json values."""

import copy
import os
import subprocess
import sys
from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from post_training.layouts.layout import RolloutPlacement
from post_training.layouts.published_names import published_name
from post_training.models.families import decoder_values, family_of, sizes_of, table_for
from post_training.report.flops import forward_flops
from rehearsal.plan import run_environment
from tests.post_training.models.published_configs import PUBLISHED_CONFIGS, nested

ROOT = Path(__file__).parents[3]
# Total bytes from each model's model.safetensors.index.json, at two bytes per parameter.
MODELS = {"3B": 7_509_245_952, "7B": 16_584_333_312, "32B": 66_905_436_672}


def published(size):
    return copy.deepcopy(PUBLISHED_CONFIGS[f"Qwen/Qwen2.5-VL-{size}-Instruct"])


@pytest.mark.parametrize("size", MODELS)
def test_shapes_equal_those_of_transformers(size):
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**published(size)))
    theirs = {published_name(name): tuple(weight.shape) for name, weight in model.named_parameters()}
    ours = table_for(published(size)).shapes
    assert ours == theirs
    assert 2 * sum(prod(shape) for shape in ours.values()) == MODELS[size]


def test_published_names_are_those_that_transformers_saves(tmp_path):
    config = published("3B") | {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    config["vision_config"] |= {"hidden_size": 32, "num_heads": 2, "out_hidden_size": 32, "depth": 1}
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config))
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {published_name(name) for name, _ in model.named_parameters()}
        assert set(file.keys()) == set(table_for(config).shapes)


@pytest.mark.parametrize("size", MODELS)
def test_all_forms_of_a_config_describe_one_model(size, tmp_path):
    flat = published(size)
    Qwen2_5_VLConfig(**copy.deepcopy(flat)).save_pretrained(tmp_path)
    saved = Qwen2_5_VLConfig.from_pretrained(tmp_path).to_dict() | {"architectures": flat["architectures"]}
    for other in (nested(flat), saved):
        assert table_for(other).shapes == table_for(flat).shapes
        assert sizes_of(other) == sizes_of(flat)
        assert forward_flops(other, 1000) == forward_flops(flat, 1000)


def test_nested_values_win_as_in_transformers():
    changed = {**nested(published("3B")), "hidden_size": 1}
    assert decoder_values(changed)["hidden_size"] == 2048
    assert Qwen2_5_VLConfig(**copy.deepcopy(changed)).get_text_config().hidden_size == 2048
    assert decoder_values(changed)["model_type"] == "qwen2_5_vl"


@pytest.mark.parametrize(("size", "tp"), [("3B", 1), ("7B", 4), ("32B", 8)])
def test_rollout_ranks_hold_every_element(size, tp):
    table = table_for(published(size))
    held = Counter()
    for rank in range(tp):
        for shard in table.vllm_ascend(RolloutPlacement(tp=tp), rank):
            held[shard.hf_name] += prod(shard.extents)
    for name, shape in table.shapes.items():
        assert held[name] >= prod(shape), name
        assert held[name] == prod(shape) or held[name] == tp * prod(shape) or "k_proj" in name or "v_proj" in name


@pytest.mark.slow
def test_tower_shards_equal_what_vllm_loads():
    """In the program, vLLM's own loaders fill the vision tower of each of two ranks."""
    program = Path(__file__).with_name("vision_tower_program.py")
    environment = os.environ | run_environment([]) | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, program], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.splitlines()[-1] == "equal at 2 ranks"


def test_family_is_trained_with_fsdp_alone():
    family = family_of(published("7B"))
    assert family.name == "Qwen2.5-VL" and family.trained_with == ("fsdp",)
    assert sizes_of(published("7B")).vision.patch == 3 * 2 * 14 * 14
