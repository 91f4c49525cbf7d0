"""In whole steps of verl in batch-invariant mode, training's log-probs equal the rollout's, to the last bit."""

import json

import pytest

from tests.stack_2026.rehearsals import STEPS, rehearse
from verl_plugin.batch_invariance.checks import ATTENTION, ATTENTION_KEY, KEY, LIBRARY

MODULES = ["verl_plugin.resume.engines", "verl_plugin.alltoallv.engines", "verl_plugin.phase_peaks", LIBRARY]
MODE = [f'++{KEY}="1"', f"+{ATTENTION_KEY}={ATTENTION}", f"actor_rollout_ref.model.external_lib=[{','.join(MODULES)}]"]
JOB = ["--model", "qwen3", "--backend", "fsdp2", "--dies", "1"]
LARGEST, MEAN = "training/rollout_probs_diff_max", "rollout_corr/log_ppl_abs_diff"


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", [MODE, []], ids=["on", "off"])
def test_rollout_and_training_differ_in_no_bit_with_the_mode_alone(tmp_path, mode):
    run = rehearse(tmp_path / "run", *JOB, "--", *mode)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    lines = (tmp_path / "run" / "verl_metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["data"] for line in lines]
    steps = [each for each in metrics if LARGEST in each]
    assert len(steps) == STEPS
    for each in steps:
        assert (each[LARGEST] == each[MEAN] == 0) == bool(mode), each
