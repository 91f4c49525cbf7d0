"""In whole steps of verl with routing replay, training uses the rollout's experts and computes the same."""

import pytest

from post_training.report import read_records
from post_training.report.metrics import EXPERT_BYTES, EXPERT_SETS_COMPARED, EXPERT_SETS_DIFFER, EXPERT_SETS_REPLACED
from rehearsal.stack_2026.records import LOG_PROB_DIFFERENCE, PROBABILITY_DIFFERENCE
from tests.stack_2026.rehearsals import STEPS, rehearse

pytestmark = pytest.mark.slow
# The tiny Qwen3-MoE has 3 layers and 8 experts a token, with one byte per expert ID.
TOKEN_BYTES = 3 * 8


def test_whole_steps_use_the_experts_of_the_rollout(tmp_path):
    run = rehearse(tmp_path / "run", "--model", "qwen3_moe", "--dies", "2")
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == STEPS
    for record in records:
        metrics = record.metrics
        assert metrics[EXPERT_SETS_DIFFER] == 0 and metrics[EXPERT_SETS_REPLACED] < 1e-3, metrics
        assert metrics[EXPERT_SETS_COMPARED] > 1000
        assert metrics[EXPERT_BYTES] == metrics["perf/total_num_tokens"] * TOKEN_BYTES
        assert metrics[PROBABILITY_DIFFERENCE] < 1e-5 and metrics[LOG_PROB_DIFFERENCE] < 1e-6, metrics
