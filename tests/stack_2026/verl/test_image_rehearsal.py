"""GRPO on prompts with images: whole steps of verl with Qwen2.5-VL, and a control that training reads the images."""

import subprocess
from pathlib import Path

import pytest

from rehearsal.resume_proof.comparison import metrics_of
from tests.stack_2026.rehearsals import MEAN_DIFFERENCE, check_computes_alike, rehearse, summary_of

pytestmark = pytest.mark.slow
SMALL = ("--model", "qwen2_5_vl", "--backend", "fsdp2")
ONE_STEP = (*SMALL, "--dies", "1", "--steps", "1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A finished run on two dies, over which the rollout shards the vision tower."""
    folder = tmp_path_factory.mktemp("images") / "run"
    return folder, rehearse(folder, *SMALL, "--dies", "2")


def test_training_and_rollout_compute_alike(finished):
    folder, run = finished
    check_computes_alike(run, folder)
    for metrics in metrics_of(folder).values():
        assert metrics["prompt_length/mean"] > 13  # including four image tokens
        assert 0.2 < metrics["critic/rewards/mean"] < 0.8
    # verl bans image placeholder tokens only in the rollout, so no answer is less probable there.
    assert metrics_of(folder)[1]["rollout_corr/log_ppl_diff_min"] > -1e-6


def test_positions_of_text_in_training_fail_the_run(tmp_path):
    own = {"VERL_USE_EXTERNAL_MODULES": "tests.stack_2026.verl.text_positions"}
    run = rehearse(tmp_path / "run", *ONE_STEP, **own)
    assert run.returncode == 1 and "Rollout and training compute differently at step 1" in run.stderr
    assert summary_of(tmp_path / "run")["rollout_log_prob_diff_mean"] > MEAN_DIFFERENCE
