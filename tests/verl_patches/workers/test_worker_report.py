"""What FSDP's workers compare of a batch: the log-probs of responses, whose tokens lie behind the prompts."""

import pytest
import torch

from verl_patches.features.measure import step_record
from verl_patches.workers.worker_report import compare_log_probs


@pytest.fixture
def difference(monkeypatch):
    monkeypatch.setattr(step_record, "_record", step_record.StepRecord())
    return step_record.current_record().difference


def batch(**columns):
    """Two prompts of 1 and 4 tokens, padded on the left to 5; responses of 3 and 1 token, padded on the right."""
    mask = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0, 0]])
    return {"attention_mask": mask, "responses": torch.zeros(2, 3, dtype=torch.int64)} | columns


def test_log_probs_of_responses_are_compared(difference):
    rollout = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -1.0, -1.0]])
    training = torch.tensor([[-1.5, -2.0, -3.25], [-4.0, -9.0, -9.0]])  # behind the end nothing is a log-prob
    compare_log_probs(batch(rollout_log_probs=rollout, old_log_probs=training))
    assert (difference.tokens, difference.total, difference.largest) == (4, 0.75, 0.5)


@pytest.mark.parametrize("missing", ["rollout_log_probs", "old_log_probs"])
def test_nothing_is_compared_without_both(difference, missing):
    columns = {name: torch.zeros(2, 3) for name in ("rollout_log_probs", "old_log_probs") if name != missing}
    compare_log_probs(batch(**columns))
    assert difference.tokens == 0
