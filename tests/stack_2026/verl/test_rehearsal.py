"""Two steps of unmodified verl 0.9.1 on emulated dies; updated weights reach vLLM, and it shows where they do not."""

import pytest

from tests.stack_2026.rehearsals import MEAN_DIFFERENCE, check_computes_alike, rehearse, summary_of

pytestmark = pytest.mark.slow
RUNS = [("megatron", "deepseek_v3", 2), ("fsdp2", "qwen3", 1)]


@pytest.mark.parametrize(("backend", "model", "dies"), RUNS)
def test_training_and_rollout_compute_alike(tmp_path, backend, model, dies):
    run = rehearse(tmp_path / "run", "--backend", backend, "--model", model, "--dies", str(dies))
    check_computes_alike(run, tmp_path / "run")


def test_weights_that_do_not_arrive_fail_the_run(tmp_path):
    own = {"VERL_USE_EXTERNAL_MODULES": "tests.stack_2026.verl.without_weights"}
    small = ("--backend", "fsdp2", "--model", "qwen3", "--dies", "1", "--steps", "1", "--weights", "naive")
    run = rehearse(tmp_path / "run", *small, **own)
    assert run.returncode == 1 and "Rollout and training compute differently at step 1" in run.stderr
    assert summary_of(tmp_path / "run")["rollout_log_prob_diff_mean"] > 1000 * MEAN_DIFFERENCE
