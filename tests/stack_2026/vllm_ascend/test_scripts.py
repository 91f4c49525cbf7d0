"""evaluate.py and serve.py with vLLM-Ascend 0.23 on the emulated NPU: greedy answers are transformers'."""

from pathlib import Path

import pytest

from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from scripts import evaluate
from tests.scripts import test_evaluate, test_serve

MODELS = ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.exhaustive)]


def made(model: str, folder: Path) -> Path:
    """Make a tiny model with random weights."""
    request = CheckpointRequest(test_evaluate.PROBLEMS, 0, "bfloat16", model_type=model, warm_start=None)
    return make_checkpoint(request, folder / "model", lambda step, loss: None).path


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dies", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_evaluated_answers_are_those_of_transformers(tmp_path, model, dies):
    folder = made(model, tmp_path)
    test_evaluate.check_answers(folder, tmp_path / "out", "--stack", "2026", "--tensor-parallel", str(dies))


@pytest.mark.slow
def test_served_answers_are_those_of_transformers(tmp_path):
    test_serve.check_answers(made("qwen3", tmp_path), tmp_path, "--stack", "2026")


def test_packages_of_this_stack_are_not_taken_for_the_other(tmp_path, capsys):
    arguments = ["--emulate", "--model", str(made("qwen3", tmp_path)), "--data", str(test_evaluate.PROBLEMS)]
    assert evaluate.main([*arguments, "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "--stack=2025 is invalid" in said and "of the stack 2026. Set it to 2026" in said
