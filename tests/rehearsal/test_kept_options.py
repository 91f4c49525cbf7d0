"""Overrides given after `--` are read back, and no tiny model is made if the user gave a model."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from post_training.processes.command import SignalFlag
from rehearsal import plan as plan_2025
from rehearsal import stages as stages_2025
from rehearsal.stack_2026 import plan as plan_2026
from rehearsal.stack_2026 import stages as stages_2026

MODEL = "actor_rollout_ref.model.path"
STACKS = [(plan_2025, stages_2025), (plan_2026, stages_2026)]


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        ((), None),
        ((f"{MODEL}=/a",), "/a"),
        ((f"{MODEL}=/a", f"+{MODEL}='/b c'"), "/b c"),
        ((f"{MODEL}=/a", f"{MODEL}=null"), None),
        ((f"{MODEL}s=/a", f"other.{MODEL}=/a"), None),
    ],
)
def test_last_value_of_an_override_is_given(overrides, value):
    options = plan_2026.Options(overrides=overrides)
    assert options.given(MODEL) == value and options.given_model == (None if value is None else Path(value))


@pytest.mark.parametrize(("plans", "stages"), STACKS, ids=["2025", "2026"])
@pytest.mark.parametrize(("overrides", "made"), [((), True), ((f"{MODEL}=/data/model",), False)])
def test_tiny_model_is_made_unless_one_is_given(monkeypatch, tmp_path, plans, stages, overrides, made):
    titles: list[str] = []

    def prepare_step(self: Any, title: str, command: list[str], plan: Any) -> None:
        titles.append(title)

    monkeypatch.setattr(stages.Rehearsal, "_prepare_step", prepare_step)
    plan = plans.make_plan(plans.Options(output=tmp_path / "run", overrides=overrides), "run")
    plan = replace(plan, checkpoint=tmp_path / "tiny")
    stages.Rehearsal(Console(file=io.StringIO()), SignalFlag(), 0.0)._prepare(plan)
    assert any("checkpoint" in title for title in titles) == made and "Making the parquet files" in titles
