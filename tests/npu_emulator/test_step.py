"""Whole steps of verl's worker while streams run late: rollout, log-probs, update and reshard, on four dies.

The worker processes, in float32. Work on streams runs late and in any order that events allow.
"""

import json
import shutil

import pytest
from omegaconf import OmegaConf

from post_training.plan.job import read_job
from post_training.plan.outside_torch import OutsideTorch
from tests.worker_processes import jobs
from tests.worker_processes.conftest import PROMPTS, overrides, random_checkpoint
from tests.worker_processes.processes import Processes
from verl_patches.trainer.main_ppo import compose

pytestmark = pytest.mark.slow
LAST_STAGE = 2
# A context of 8 MiB, and for each of the two buffers of a communicator 4 MiB, or 2 where two ranks send to each other.
BESIDE_PROGRAMS = {
    "NPU_EMULATOR_CONTEXT_MB": "8",
    "NPU_EMULATOR_HCCL_BUFFERS": "1",
    "HCCL_BUFFSIZE": "4",
    "P2P_HCCL_BUFFSIZE": "2",
}


# Any of them may be the first to show a wait that is missing.
@pytest.fixture(
    scope="module",
    params=[pytest.param(seed, marks=[pytest.mark.exhaustive] if seed > 1 else []) for seed in range(1, 21)],
)
def workers(request, tmp_path_factory):
    checkpoint = random_checkpoint(tmp_path_factory.mktemp("step"))
    description = checkpoint.with_name("description")
    shutil.copytree(checkpoint, description, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = [*overrides(checkpoint, description), "actor_rollout_ref.overlay.measure.verify_weights=true"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_EMULATOR_STREAM_SEED", str(request.param))
        for name, value in BESIDE_PROGRAMS.items():
            patch.setenv(name, value)
        with Processes() as running:
            running.report = running.run(jobs.build, settings)[0]
            running.first = running.run(jobs.bytes_beside_programs)
            running.planned = planned(settings, json.loads((description / "config.json").read_text()))
            yield running


def planned(settings: list[str], model: dict) -> tuple[int, int]:
    """Return the planned bytes beside tensors for these settings, as (when the engine is built, at most)."""
    job = read_job(OmegaConf.to_container(compose("rehearsal", settings), resolve=True), model)
    outside = OutsideTorch(hccl_buffer=4 << 20, cann=8 << 20, p2p_buffer=2 << 20)
    return outside.when_the_engine_is_built(job), outside.at_most(job)


def test_two_steps_train_and_the_rollout_has_the_weights_and_log_probs_of_training(workers):
    assert not workers.report["problems"]
    assert workers.run(jobs.differing_at_first) == [[]] * 4
    responses = []
    for step in range(2):
        responses.append(workers.run(jobs.rollout, PROMPTS)[0]["responses"])
        workers.run(jobs.old_log_prob)
        workers.run(jobs.reference_log_prob)
        metrics = workers.run(jobs.update, step)[LAST_STAGE]
        assert metrics["reshard/weights_differing"] == 0
        assert 0 < metrics["training/rollout_logprob_diff_max"] < 1e-3
        assert metrics["actor/grad_norm"][0] > 0
    assert any(metrics["actor/kl_loss"]), "the first update moved the policy away from the reference"
    assert responses[0] != responses[1]


def test_cann_and_hccl_memory_matches_the_plan(workers):
    """It is measured after steps, so that every group has had a collective."""
    workers.run(jobs.rollout, PROMPTS)
    when_built, at_most = workers.planned
    assert workers.first == [when_built] * 4
    assert workers.run(jobs.bytes_beside_programs) == [at_most] * 4


def test_a_single_wrong_weight_is_found_by_the_comparison(workers):
    workers.run(jobs.rollout, PROMPTS)
    assert workers.run(jobs.differing_weights, disturb=False) == [[]] * 4
    assert [len(names) for names in workers.run(jobs.differing_weights, disturb=True)][0] == 1
