"""Rehearsals of the tests choose a shared template, or processes of their own."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from rehearsal.stack_2026.plan import Options, VerlPlan
from rehearsal.stack_2026.training import KEY, MEGATRON, MODULES
from tests.shared_templates import SHARED, describe
from tests.stack_2026.shared_training import run_command

CLIENT = "python client.py /socket"


@pytest.fixture
def plan(tmp_path, monkeypatch) -> VerlPlan:
    """A rehearsal that would import as the only template did."""
    made = VerlPlan(
        Options(model="qwen3", backend="fsdp2", dies=1), tmp_path / "run", tmp_path / "checkpoint", tmp_path
    )
    variables = {**os.environ, **VerlPlan(Options(), Path(), Path()).environment()}
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


def test_variable_of_a_test_is_seen_by_imports(plan, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "tests.stack_2026.verl.without_weights")
    assert run_command(plan) == plan.run_command()
