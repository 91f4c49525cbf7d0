"""Folders that are accepted as a model, and the engine's environment on each stack."""

import importlib.metadata
from pathlib import Path

import pytest

from overlay.pins import Pins
from post_training.checkpoint.complete_files import write_complete
from scripts.inference import models


def test_run_stands_for_its_newest_complete_checkpoint(tmp_path, monkeypatch):
    """Whether a checkpoint is complete is tested with the trainings' checkpoints, in features/training_checkpoint."""
    monkeypatch.setattr(models, "newest_step", lambda root: (2, ["global_step_10: not complete"]))
    run = tmp_path / "run"
    for step in (2, 10):
        (run / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    newest = run / "checkpoints" / "global_step_2"
    assert models.newest_checkpoint(run) == models.newest_checkpoint(run / "checkpoints") == newest
    assert models.newest_checkpoint(newest) == newest
    monkeypatch.undo()
    with pytest.raises(models.InferenceError, match="no checkpoint is complete: .*global_step_10"):
        models.newest_checkpoint(run)


def test_relative_path_is_of_the_users_folder(tmp_path, monkeypatch):
    """Engines start in the checkout, which may have another model at the same relative path."""
    for root in ("user", "checkout"):
        model = tmp_path / root / "models" / "qwen"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path / "user")
    found = models.find_model("models/qwen")
    monkeypatch.chdir(tmp_path / "checkout")
    assert (found.name, found.folder) == ("qwen", tmp_path / "user" / "models" / "qwen") and found.given.is_absolute()


def verl_step(folder: Path, *weights: str) -> Path:
    """Write the files by which a whole step of the stack 2026 is recognised, and return its folder."""
    actor = folder / "global_step_4" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "fsdp_config.json").write_text('{"world_size": 1}')
    (actor / "huggingface" / "config.json").write_text("{}")
    for name in weights:
        (actor / "huggingface" / name).touch()
    write_complete(actor.parent)
    return actor.parent


def test_run_of_the_stack_2026_stands_for_its_newest_whole_step(tmp_path):
    step = verl_step(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints" / "global_step_5" / "actor").mkdir(parents=True)
    found = models.find_model(f"trained={tmp_path / 'run'}")
    assert found == models.Model("trained", step, None)
    assert models.described(found) == step / "actor" / "huggingface"
    (step / "complete.json").unlink()
    with pytest.raises(models.InferenceError, match="no checkpoint is complete"):
        models.find_model(str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"global_step_4 is not complete: it has no complete.json"):
        models.described(models.find_model(str(step)))


def test_model_that_verl_saved_with_a_step_is_taken_as_it_is(tmp_path):
    step = verl_step(tmp_path, "model.safetensors")
    assert models.find_model(str(step)).folder == step / "actor" / "huggingface"


def test_packages_of_another_stack_rejected(monkeypatch):
    releases = {name: Pins.read(stack=name).of_module("vllm").release for name in models.STACKS}
    assert len(set(releases.values())) == 2
    for name, release in releases.items():
        (other,) = releases.keys() - {name}
        monkeypatch.setattr(importlib.metadata, "version", lambda package, release=release: f"{release}+empty")
        models.check_stack(name)
        with pytest.raises(models.InferenceError, match=f"--stack={other} is invalid: .* of the stack {name}. Set it"):
            models.check_stack(other)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1.0")
    models.check_stack("2025")


@pytest.mark.parametrize(("stack", "graphs"), [("2025", "VLLM_USE_V1"), ("2026", "TORCHDYNAMO_DISABLE")])
def test_engine_has_the_variables_of_its_stack(tmp_path, stack, graphs):
    emulated = models.engine_environment(tmp_path, True, 2, "node", stack)
    assert emulated[graphs] == "1" and emulated["NPU_EMULATOR_STRICT"] == "1"
    assert (emulated["NPU_EMULATOR_DEVICES"], emulated["NPU_EMULATOR_NODE"]) == ("2", "node")
    real = models.engine_environment(tmp_path, False, 2, "node", stack)
    assert "CANN_ENV" not in real and real["HCCL_EXEC_TIMEOUT"] and not any(name.startswith("NPU_EM") for name in real)
