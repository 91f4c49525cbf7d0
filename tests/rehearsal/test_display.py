"""The final output of a run."""

import io

import pytest
from rich.console import Console

from post_training.report import LoggedStep, RunFacts, summarise
from rehearsal.display import print_summary

FACTS = RunFacts(seed=1, dies=4, wall_s=100.0, precision="float32")


@pytest.mark.parametrize(
    ("saving", "shown"), [({}, "3.00: rollout"), ({"timing_s/save_checkpoint": 1.25}, "3.00, 1.75 without saving and")]
)
def test_seconds_without_saving_and_validation_shown(saving, shown, tmp_path):
    metrics = {"timing_s/step": 3.0, "timing_s/gen": 1.0, **saving}
    printed = io.StringIO()
    summary = summarise([LoggedStep(step, float(step), metrics) for step in (1, 2)], FACTS)
    print_summary(Console(file=printed, width=200), summary, tmp_path)
    assert shown in printed.getvalue()
