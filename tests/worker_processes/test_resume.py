"""A resumed run is bit-identical to the unbroken one, and every planted fault of a checkpoint makes a difference.

The processes always start from their initial state: other weights, no optimizer state, other random numbers. All that
they have of the run comes from the checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from post_training.checkpoint.command_line import run_tool
from post_training.checkpoint.manifest import Manifest
from scripts import export_hf
from tests.worker_processes import jobs
from tests.worker_processes.conftest import PROMPTS

pytestmark = pytest.mark.slow
# A schedule in which every step has a different rate.
SCHEDULE = {"warmup_style": "linear", "lr_warmup_steps": 2, "total_training_steps": 10}
CONSTANT = {"warmup_style": "constant", "lr_warmup_steps": -1, "total_training_steps": -1}


def step(processes, number):
    """Run a whole step. Return the rollout and the training metrics of every rank, and the digest at the end."""
    rollout = processes.run(jobs.rollout, PROMPTS)
    processes.run(jobs.old_log_prob)
    processes.run(jobs.reference_log_prob)
    processes.run(jobs.finish_save)
    metrics = processes.run(jobs.update, number, training_step=number)
    measured = [{k: v for k, v in each.items() if k.startswith(("actor/", "training/"))} for each in metrics]
    return rollout, measured, processes.run(jobs.digest)


@pytest.fixture(scope="module")
def unbroken(processes, tmp_path_factory):
    """Run four steps, saving after the second; the save is written while the third generates."""
    processes.run(jobs.recall)
    processes.run(jobs.schedule, **SCHEDULE)
    folder = tmp_path_factory.mktemp("run") / "actor"
    first = [step(processes, number) for number in (1, 2)]
    held = processes.run(jobs.host_bytes)
    processes.run(jobs.save, str(folder))
    assert not (folder / "manifest.json").exists(), "nobody has waited yet"
    assert processes.run(jobs.digest) == first[-1][2], "saving changes nothing"
    later = [step(processes, number) for number in (3, 4)]
    assert processes.run(jobs.host_bytes) == held, "a save keeps nothing on the host that is not there anyway"
    yield SimpleNamespace(folder=folder, later=later)
    processes.run(jobs.recall)
    processes.run(jobs.schedule, **CONSTANT)


def resumed(processes, unbroken, fault=None):
    processes.run(jobs.recall)
    processes.run(jobs.load, str(unbroken.folder), fault)


def test_two_steps_after_a_resume_are_those_of_the_unbroken_run(processes, unbroken):
    resumed(processes, unbroken)
    for number, expected in enumerate(unbroken.later, start=3):
        rollout, measured, bits = step(processes, number)
        assert rollout == expected[0]
        assert measured == expected[1]
        assert bits == expected[2]
    assert measured[2]["actor/lr"] != unbroken.later[0][1][2]["actor/lr"]


@pytest.mark.parametrize(
    "fault", ["no steps", "an expert of another rank", "weights rounded to bfloat16", "no random states"]
)
def test_faulty_resume_detected(processes, unbroken, fault):
    resumed(processes, unbroken, fault)
    rollout, measured, bits = step(processes, 3)
    assert bits != unbroken.later[0][2]
    if fault == "no random states":
        assert rollout != unbroken.later[0][0]


def test_restarted_learning_rate_detected(processes, unbroken):
    resumed(processes, unbroken)
    assert step(processes, 1)[2] != unbroken.later[0][2]


def test_every_element_is_stored_once_and_nothing_is_pickled(unbroken):
    manifest = json.loads((unbroken.folder / "manifest.json").read_text())
    assert manifest["complete"] and len(manifest["files"]) == 4
    assert {file.name for file in unbroken.folder.iterdir()} == {*manifest["files"], "manifest.json"}
    stored = {"master": 0, "exp_avg": 0, "exp_avg_sq": 0, "weight": 0}
    for name in manifest["files"]:
        with safe_open(unbroken.folder / name, "pt") as file:
            assert file.metadata()["optimizer_steps"] == "2"
            for key in file.keys():
                state = key.split("/")[0]
                if state != "random":
                    stored[state] += file.get_slice(key).get_shape() and file.get_tensor(key).numel()
    assert stored["master"] == stored["exp_avg"] == stored["exp_avg_sq"] > 10 * stored["weight"] > 0
    total = sum(entry["bytes"] for entry in manifest["files"].values())
    assert total <= 1.02 * 12 * stored["master"], f"{total} bytes for {stored['master']} parameters"


def log_probs(model: Path, batch: dict[str, list[list[int]]], temperature: float) -> torch.Tensor:
    """Return transformers' log-probs of the responses, (responses, tokens) float32; prompts are left-padded."""
    tokens, mask = torch.tensor(batch["input_ids"]), torch.tensor(batch["attention_mask"])
    loaded, said = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"] and loaded.dtype == torch.float32
    with torch.no_grad():
        logits = loaded.eval()(tokens, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    length = len(batch["responses"][0])
    scores = (logits[:, -length - 1 : -1] / temperature).log_softmax(-1)
    return scores.gather(-1, torch.tensor(batch["responses"]).unsqueeze(-1)).squeeze(-1)


def test_transformers_has_the_log_probs_of_the_training(processes, unbroken, checkpoint, tmp_path):
    """For 64 prompts after a resume, training's log-probs equal transformers' on the exported step.

    The control is the model with which training began.
    """
    resumed(processes, unbroken)
    processes.run(jobs.rollout, [[3, 10 + index, 90 - index, 30, 40 + index % 5, 4] for index in range(64)])
    training = torch.tensor(processes.run(jobs.old_log_prob)[0])
    batch = processes.run(jobs.tokens)[0]
    answered = torch.tensor(batch["attention_mask"])[:, -training.shape[1] :].bool()
    Manifest({}, complete=True).write(unbroken.folder.parent)
    options = [str(unbroken.folder.parent), str(tmp_path / "hf"), "--hf-dir", str(checkpoint)]
    assert run_tool(export_hf.parse_arguments(options), export_hf.plan) == 0

    def differences(model: Path) -> torch.Tensor:
        return (log_probs(model, batch, 0.8) - training)[answered].abs()

    assert len({tuple(row[: -training.shape[1]]) for row in batch["input_ids"]}) == 64
    assert differences(tmp_path / "hf").max() < 1e-5
    assert differences(checkpoint).max() > 1e-3
