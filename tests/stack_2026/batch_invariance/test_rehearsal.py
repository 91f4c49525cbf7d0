"""In whole steps of verl in batch-invariant mode, training's log-probs equal the rollout's, to the last bit."""

import json

import pytest

from tests.stack_2026.rehearsals import STEPS, rehearse
from verl_plugin.batch_invariance.checks import ATTENTION, ATTENTION_KEY, KEY, LIBRARY

MODULES = [
    "verl_plugin.resume.engines", "verl_plugin.alltoallv.engines", "verl_plugin.routing_replay.engines",
    "verl_plugin.heartbeats.engines", "verl_plugin.phase_peaks", "verl_plugin.offload.engines",
]  # fmt: skip
JOB = ["--backend", "fsdp2", "--dies", "1"]
REPLAY = [
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
    *(f"+actor_rollout_ref.{part}.fsdp_config.router_replay.mode=R3" for part in ("actor", "ref")),
]
LARGEST, MEAN = "training/rollout_probs_diff_max", "rollout_corr/log_ppl_abs_diff"


def libraries(*more: str) -> str:
    return f"actor_rollout_ref.model.external_lib=[{','.join([*MODULES, *more])}]"


MODE = [f'++{KEY}="1"', f"+{ATTENTION_KEY}={ATTENTION}", libraries(LIBRARY)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", [MODE, [libraries()]], ids=["on", "off"])
@pytest.mark.parametrize("model", [["qwen3"], ["qwen3_moe", "--", *REPLAY]], ids=["dense", "mixture"])
def test_rollout_and_training_differ_in_no_bit_with_the_mode_alone(tmp_path, model, mode):
    name, *replay = model
    run = rehearse(tmp_path / "run", "--model", name, *JOB, *(replay or ["--"]), *mode)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    lines = (tmp_path / "run" / "verl_metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["data"] for line in lines]
    steps = [each for each in metrics if LARGEST in each]
    assert len(steps) == STEPS
    for each in steps:
        assert (each[LARGEST] == each[MEAN] == 0) == (mode == MODE), each
