"""A whole step of verl's worker on the published torch_npu: rollout, log-probs, update and reshard, on four dies.

The rig's processes, in float32. Work on streams runs late and in any order that events allow.
"""

import shutil

import npu_emulator_engine
import pytest

from tests.rig import jobs
from tests.rig.conftest import PROMPTS, overrides, random_checkpoint
from tests.rig.processes import Processes

pytestmark = pytest.mark.slow
LAST_STAGE = 2


# Any of them may be the first to show a wait that is missing.
@pytest.fixture(
    scope="module",
    params=[pytest.param(seed, marks=[pytest.mark.exhaustive] if seed > 1 else []) for seed in range(1, 21)],
)
def rig(request, tmp_path_factory):
    checkpoint = random_checkpoint(tmp_path_factory.mktemp("step_on_cann"))
    description = checkpoint.with_name("description")
    shutil.copytree(checkpoint, description, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = [*overrides(checkpoint, description), "actor_rollout_ref.overlay.measure.verify_weights=true"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_EMULATOR_ENGINE", "cann")
        patch.setenv("NPU_EMULATOR_STREAM_SEED", str(request.param))
        with Processes() as running:
            running.report = running.run(jobs.build, settings)[0]
            yield running


def test_two_steps_train_and_the_rollout_has_the_weights_and_log_probs_of_training(rig):
    assert rig.run(jobs.file_of_torch_npu) == [str(npu_emulator_engine.FOLDER / "torch_npu" / "__init__.py")] * 4
    assert not rig.report["problems"]
    assert rig.run(jobs.differing_at_first) == [[]] * 4
    responses = []
    for step in range(2):
        responses.append(rig.run(jobs.rollout, PROMPTS)[0]["responses"])
        rig.run(jobs.old_log_prob)
        rig.run(jobs.reference_log_prob)
        metrics = rig.run(jobs.update, step)[LAST_STAGE]
        assert metrics["reshard/weights_differing"] == 0
        assert 0 < metrics["training/rollout_logprob_diff_max"] < 1e-3
        assert metrics["actor/grad_norm"][0] > 0
    assert metrics["actor/kl_loss"] != 0, "the first update moved the policy away from the reference"
    assert responses[0] != responses[1]


def test_a_single_wrong_weight_is_found_by_the_comparison(rig):
    rig.run(jobs.rollout, PROMPTS)
    assert rig.run(jobs.differing_weights, disturb=False) == [[]] * 4
    assert [len(names) for names in rig.run(jobs.differing_weights, disturb=True)][0] == 1
