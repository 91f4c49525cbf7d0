"""Rehearsals of the tests choose a shared template, or processes of their own."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rehearsal.plan import ROOT
from rehearsal.stack_2026 import plan as plan_module
from rehearsal.stack_2026.plan import Options, Rehearsal2026Plan
from rehearsal.stack_2026.training import KEY, MEGATRON, MODULES
from rehearsal.tiny_model.warm_start import WarmStart
from tests.shared_templates import SHARED, describe
from tests.stack_2026 import short_warm_start
from tests.stack_2026.shared_training import checkpoint_command, checkpoint_key, run_command

CLIENT = "python client.py /socket"


@pytest.fixture
def plan(tmp_path, monkeypatch) -> Rehearsal2026Plan:
    """A rehearsal that would import as the only template did."""
    made = Rehearsal2026Plan(
        Options(model="qwen3", backend="fsdp2", dies=1), tmp_path / "run", tmp_path / "checkpoint", tmp_path
    )
    variables = {**os.environ, **Rehearsal2026Plan(Options(), Path(), Path()).environment()}
    monkeypatch.setenv(SHARED, json.dumps([describe((*MODULES, *MEGATRON), variables, CLIENT)]))
    return made


def test_training_that_imports_alike_is_forked(plan):
    command, own = run_command(plan), plan.run_command()
    assert command[:4] == [*CLIENT.split(), "-c"] and command[5:] == [*own[3:], f"{KEY}='{CLIENT}'"]


@pytest.mark.parametrize(
    "options", [{"backend": "mindspeed", "model": "qwen3"}, {"rollout_dies": 1, "dies": 2}], ids=["before", "level"]
)
def test_training_that_imports_otherwise_has_its_own_processes(plan, options):
    other = dataclasses.replace(plan, options=dataclasses.replace(plan.options, **options))
    assert run_command(other) == other.run_command()


def test_program_of_a_rehearsal_imports_no_torch():
    """torch and torch_npu set variables when they are imported, and then no template would suit."""
    program = "import sys, tests.stack_2026.shared_training; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=300).returncode == 0


def test_variable_of_a_test_is_seen_by_imports(plan, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "tests.stack_2026.verl.without_weights")
    assert run_command(plan) == plan.run_command()


@pytest.mark.parametrize(
    ("options", "short"), [({}, True), ({"tool": "calculator"}, False), ({"model": "qwen2_5_vl"}, False)]
)
def test_models_without_a_warm_start_of_their_own_have_a_short_one(plan, options, short):
    other = dataclasses.replace(plan, options=dataclasses.replace(plan.options, **options))
    command, own = checkpoint_command(other), other.checkpoint_command()
    assert command == ([own[0], "-m", "tests.stack_2026.short_warm_start", *own[2:]] if short else own)
    assert (checkpoint_key(other.options) != plan_module.checkpoint_key(other.options)) == short


def test_short_warm_start_has_fewer_steps(tmp_path, monkeypatch, capsys):
    steps = []
    monkeypatch.setattr(sys, "argv", ["", "--output", str(tmp_path / "tiny"), "--model-type", "qwen3"])
    monkeypatch.setattr("rehearsal.tiny_model.warm_start.fit", lambda *given: steps.append(given[2].steps))
    assert short_warm_start.main() == 0 and steps == [short_warm_start.STEPS]
    assert short_warm_start.STEPS < WarmStart().steps / 3 and "wrote the checkpoint" in capsys.readouterr().out
