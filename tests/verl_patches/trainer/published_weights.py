"""A tiny checkpoint in the published format of DeepSeek-V3, and the steps of docs/cluster.md before training."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from transformers import DeepseekV3Config

from tests.post_training.checkpoint.synthetic import Synthetic

ROOT = Path(__file__).parents[3]
NOT_SYNTHETIC = (
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
NOT_WEIGHTS = shutil.ignore_patterns("*.safetensors", "model.safetensors.index.json")


def write_published(checkpoint: Path, folder: Path, seed: int = 0) -> Path:
    """Write FP8 weights with scales in several files, a multi-token prediction layer, and the other files of
    `checkpoint`, whose sizes the model has."""
    config = DeepseekV3Config.from_pretrained(checkpoint, num_nextn_predict_layers=1)
    Synthetic(config, seed=seed).write(folder)
    for file in NOT_SYNTHETIC:
        shutil.copy(checkpoint / file, folder)
    return folder


def cast(published: Path, folder: Path) -> Path:
    """Write the checkpoint in bfloat16 with the guide's command."""
    command = [sys.executable, "scripts/fp8_cast_bf16.py", "--input-fp8-hf-path", str(published)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--output-bf16-hf-path", str(folder)], cwd=ROOT, env=environment, check=True)
    edit_description(folder)
    return folder


def describe(published: Path, folder: Path) -> Path:
    """Write the folder that describes the model to train: configuration and tokenizer, no weights."""
    shutil.copytree(published, folder, ignore=NOT_WEIGHTS)
    edit_description(folder)
    return folder


def edit_description(folder: Path) -> None:
    """Edit config.json as the guide says: no quantization_config and no multi-token prediction layer."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    values.pop("quantization_config", None)
    file.write_text(json.dumps(values | {"num_nextn_predict_layers": 0}))
