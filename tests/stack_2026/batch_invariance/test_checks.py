"""The key of the batch-invariant mode, and the settings that are rejected with it."""

import pytest

from tests.stack_2026.verl.test_jobs import MODELS, ONE_CARD, ONE_NODE, ROLLOUT
from verl_plugin.alltoallv.settings import LIBRARY as ALLTOALLV
from verl_plugin.batch_invariance.checks import ATTENTION_KEY, KEY, LIBRARY, BatchInvariance
from verl_plugin.jobs import JobError, check_job, compose_job

ON = f"+{KEY}='1'"
PIECES = f"++{ROLLOUT}.engine_kwargs.vllm.compilation_config.cudagraph_mode=PIECEWISE"
TRAINS = f"+{ATTENTION_KEY}=batch_invariant"
LOADS = f"actor_rollout_ref.model.external_lib=[{ALLTOALLV},{LIBRARY}]"


def test_mode_is_off_by_default():
    config = check_job(compose_job(ONE_CARD, []), MODELS[ONE_CARD])
    assert BatchInvariance.from_config(config) == BatchInvariance(rollout=False, training=False)


@pytest.mark.parametrize("graphs", [PIECES, f"{ROLLOUT}.enforce_eager=true"])
def test_mode_without_whole_graphs_passes(graphs):
    config = check_job(compose_job(ONE_CARD, [ON, graphs]), MODELS[ONE_CARD])
    assert BatchInvariance.from_config(config) == BatchInvariance(rollout=True)


def test_training_that_adds_up_as_the_rollout_passes():
    config = check_job(compose_job(ONE_CARD, [ON, PIECES, TRAINS, LOADS]), MODELS[ONE_CARD])
    assert BatchInvariance.from_config(config) == BatchInvariance(rollout=True, training=True)


@pytest.mark.parametrize(
    ("job", "overrides", "says"),
    [
        (ONE_CARD, [ON.replace("1", "yes"), PIECES], "vLLM reads a number there. Set it to '1' or '0'"),
        (ONE_CARD, [ON, PIECES.replace("PIECEWISE", "FULL_DECODE_ONLY")], "whole graphs capture another one"),
        (ONE_NODE, [ON, PIECES], "npu_grouped_matmul"),
        (ONE_CARD, [ON, PIECES, TRAINS], f"Set it to [..., {LIBRARY}]"),
        (ONE_CARD, [TRAINS, LOADS], f"the rollout sums in another order without {KEY}=1"),
        (ONE_NODE, [ON, PIECES, TRAINS, LOADS], "megatron has its own attention. Set it to null"),
    ],
)
def test_settings_unsupported_by_the_mode_rejected(job, overrides, says):
    with pytest.raises(JobError) as caught:
        check_job(compose_job(job, overrides), MODELS[job])
    assert says in str(caught.value), caught.value


def test_training_with_biases_rejected():
    """In Qwen2.5 `aten::linear` depends on the batch (see `test_search.py`), and training does not replace it."""
    model = MODELS[ONE_CARD] | {"model_type": "qwen2"}
    with pytest.raises(JobError, match=f"{ATTENTION_KEY}=batch_invariant is invalid: the model's projections"):
        check_job(compose_job(ONE_CARD, [ON, PIECES, TRAINS, LOADS]), model)
    assert check_job(compose_job(ONE_CARD, [ON, PIECES]), model)
