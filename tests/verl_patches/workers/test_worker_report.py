"""The metrics and events that workers report at their start and after an update, and FSDP's comparison of a batch."""

import json
from types import SimpleNamespace

import pytest
import torch

import overlay
from verl_patches.features.expert_sets import records
from verl_patches.features.measure import step_record
from verl_patches.features.measure.feature import MeasureSettings
from verl_patches.workers.worker_report import compare_log_probs, finish_update, report_start


@pytest.fixture
def difference(own_context):
    return step_record.current_record().difference


def batch(**columns):
    """Return two prompts of 1 and 4 tokens, left-padded to 5, with responses of 3 and 1 tokens, right-padded."""
    mask = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0, 0]])
    return {"attention_mask": mask, "responses": torch.zeros(2, 3, dtype=torch.int64)} | columns


def test_log_probs_of_responses_are_compared(difference):
    rollout = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -1.0, -1.0]])
    training = torch.tensor([[-1.5, -2.0, -3.25], [-4.0, -9.0, -9.0]])  # values behind the end are not log-probs
    compare_log_probs(batch(rollout_log_probs=rollout, old_log_probs=training))
    assert (difference.tokens, difference.total, difference.largest) == (4, 0.75, 0.5)


@pytest.mark.parametrize("missing", ["rollout_log_probs", "old_log_probs"])
def test_comparison_needs_both_sides(difference, missing):
    columns = {name: torch.zeros(2, 3) for name in ("rollout_log_probs", "old_log_probs") if name != missing}
    compare_log_probs(batch(**columns))
    assert difference.tokens == 0


@pytest.fixture
def run(monkeypatch, own_context, tmp_path):
    """Report three applied patches, one of which is not in use; the step has one more metric."""
    report = SimpleNamespace(applied=["a", "b", "c"], effective={"a": True, "b": False, "c": True}, as_dict=dict)
    monkeypatch.setattr(overlay, "report", lambda: report)
    monkeypatch.setattr(overlay, "assert_effective", lambda: report)
    monkeypatch.setattr(step_record, "finish_step", lambda: dict(step_record.current_record().counts))
    monkeypatch.setattr(records, "process_choices", lambda: SimpleNamespace(metrics=lambda: {"experts": 2.0}))
    return MeasureSettings(output_dir=str(tmp_path))


@pytest.mark.parametrize("differing, exact", [(0, 1.0), (3, 0.0), (None, None)])
def test_metrics_of_the_step_are_added_to_the_updates(run, differing, exact):
    metrics = {"actor/loss": 1.0}
    if differing is not None:
        step_record.current_record().count("reshard/weights_differing", differing)
    finish_update(metrics, 0, run)
    patches = {"overlay/patches_applied": 3, "overlay/patches_ineffective": 1}
    weights = {} if exact is None else {"reshard/weights_differing": differing, "reshard/weights_exact": exact}
    assert metrics == {"actor/loss": 1.0, "experts": 2.0, **patches, **weights}


@pytest.mark.parametrize(
    "rank, rollout, events", [(0, True, ["rollout_ready"]), (0, False, ["reference_ready"]), (1, True, [])]
)
def test_the_first_rank_says_which_model_is_ready(run, tmp_path, rank, rollout, events):
    report_start(SimpleNamespace(rank=rank, _is_rollout=rollout), run)
    file = tmp_path / "events.jsonl"
    said = [json.loads(line)["event"] for line in file.read_text().splitlines()] if file.exists() else []
    assert said == events
