"""The command line of verl's quick start on Ascend, as published except for model and data, on eight emulated dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rehearsal.plan import run_environment
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from tests.verl_patches.trainer.configuration_checks.test_fsdp import NAME, PUBLISHED

ROOT = Path(__file__).parents[3]
PROBLEMS = ROOT / "data" / "arithmetic" / "train.jsonl"
DIES, STEPS, BATCH, RESPONSES = 8, 2, 128, 5


def write_data(folder: Path) -> list[str]:
    """Write the problems for two steps of an epoch in GSM8K's form. Return the overrides for the two files."""
    for name, first, count in (("train", 0, STEPS * BATCH), ("test", 500, 8)):
        lines = [{"question": f"{a}+1", "answer": f"#### {a + 1}"} for a in range(first, first + count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    convert = [sys.executable, ROOT / "scripts" / "json_to_parquet.py", "--output_dir", folder]
    files = ["--json_path", folder / "train.jsonl", "--test_json_path", folder / "test.jsonl"]
    subprocess.run([*convert, *files], check=True)
    return [f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/test.parquet"]


@pytest.mark.exhaustive
def test_the_published_command_line_trains_for_an_epoch(tmp_path):
    request = CheckpointRequest(PROBLEMS, 0, "bfloat16", model_type="qwen2", warm_start=None)
    model = make_checkpoint(request, tmp_path / "model", lambda step, loss: None).path
    paths = [f"actor_rollout_ref.model.path={model}", *write_data(tmp_path)]
    # The output folder is not a setting of verl's; everything else is as published.
    output = tmp_path / "run"
    own = [f"actor_rollout_ref.overlay.measure.output_dir={output}", f"trainer.default_local_dir={output}/checkpoints"]
    environment = os.environ | run_environment(()) | {"PYTHONPATH": str(ROOT)}
    environment |= {"NPU_EMULATOR_DEVICES": str(DIES), "NPU_EMULATOR_CAPACITY_MB": "1024"}
    command = [sys.executable, "-m", "rehearsal.training", "--config-name", NAME, *PUBLISHED, *paths, *own]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    configuration, published = OmegaConf.load(output / "config.yaml"), OmegaConf.from_dotlist(PUBLISHED)
    assert OmegaConf.merge(configuration, published) == configuration
    entries = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [entry["metrics"] for entry in entries if entry["step"]]
    assert len(steps) == STEPS and all(step["actor/grad_norm"] > 0 for step in steps)
    # Every die trained with the published batch size, lengths and learning rate.
    assert all(step["prompt_length/max"] <= 512 and step["response_length/max"] == 128 for step in steps)
    samples = json.loads((output / "samples.last.json").read_text())["samples"]
    assert len([each for each in samples if each["group"] == samples[0]["group"]]) == RESPONSES
    assert [step["actor/lr"] for step in steps] == [5e-7] * STEPS
    assert len(list((output / "memory").glob("*.json"))) == DIES
    assert not (output / "checkpoints").exists() or not list((output / "checkpoints").glob("global_step_*"))
