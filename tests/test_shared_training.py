"""Trainings of the tests choose a shared template, or processes of their own."""

import json
import os

import pytest

from rehearsal.plan import Options, make_plan, run_environment
from tests.shared_templates import SHARED, describe
from tests.shared_training import MODULES, command_of, run_command

CLIENT = "python client.py /socket"


@pytest.fixture(params=[["actor_rollout_ref.overlay.precision=float32"], []], ids=["float32", "bfloat16"])
def environment(request, monkeypatch) -> dict[str, str]:
    """The environment of a job in either precision, while the only template is for one in bfloat16."""
    shared = {**os.environ, **run_environment(())}
    monkeypatch.setenv(SHARED, json.dumps([describe(MODULES, shared, CLIENT)]))
    return {**os.environ, **run_environment(request.param)}


def test_training_that_imports_alike_is_forked(environment):
    command = command_of(["--config-name", "a_job"], environment)
    assert command[:3] == ["python", "client.py", "/socket"] and command[-2:] == ["--config-name", "a_job"]


def test_training_that_imports_otherwise_has_its_own_processes(environment):
    command = command_of(["--config-name", "a_job"], environment | {"VERL_USE_EXTERNAL_MODULES": "another"})
    assert command[1:] == ["-m", "rehearsal.training", "--config-name", "a_job"]


def test_rehearsal_with_another_chip_has_its_own_processes(tmp_path, monkeypatch):
    plan = make_plan(Options(output=tmp_path), "")
    monkeypatch.setenv(SHARED, json.dumps([describe(MODULES, {**os.environ, **plan.environment()}, CLIENT)]))
    assert run_command(plan)[:2] == ["python", "client.py"]
    other = make_plan(Options(output=tmp_path, chip="a2"), "")
    assert run_command(other) == other.run_command()
