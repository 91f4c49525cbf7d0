"""The key of the batch-invariant mode, and the settings that are rejected with it."""

import pytest

from tests.stack_2026.verl.test_jobs import DIES_128, DIES_256, MODELS, ONE_CARD, ONE_NODE, ROLLOUT
from verl_plugin.alltoallv.settings import LIBRARY as ALLTOALLV
from verl_plugin.batch_invariance.checks import (
    ATTENTION_KEY,
    KEY,
    LIBRARY,
    BatchInvariance,
    invariance_model_problems,
)
from verl_plugin.jobs import JobError, check_job, compose_job
from verl_plugin.rollout import WORKER, WORKER_KEY

ON = f"+{KEY}='1'"
PIECES = f"++{ROLLOUT}.engine_kwargs.vllm.compilation_config.cudagraph_mode=PIECEWISE"
TWO_DIES = [f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"]
ULYSSES = "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=2"
FUSED = f"+{ROLLOUT}.engine_kwargs.vllm.additional_config.enable_fused_mc2=1"
UPSTREAM = f"{WORKER_KEY}=null"
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
        (ONE_NODE, [ON, PIECES, UPSTREAM], f"(npu_grouped_matmul). Set it to {WORKER}"),
        (ONE_NODE, [ON, PIECES, f"{ROLLOUT}.quantization=fp8"], "quantised experts have no invariant products"),
        (ONE_NODE, [ON, PIECES, FUSED], "one operator multiplies and exchanges"),
        (DIES_128, [ON, PIECES], "by which operators experts are exchanged. Set it to 15 or less"),
        (DIES_256, [ON, PIECES], "latent attention calls operators that vLLM-Ascend 0.23 does not replace"),
        (ONE_CARD, [ON, PIECES, TRAINS, LOADS, *TWO_DIES], "does not split sums"),
        (
            ONE_CARD,
            [ON, PIECES, TRAINS, LOADS, ULYSSES, TWO_DIES[1]],
            "sees only a rank's part of a sequence",
        ),
        (ONE_CARD, [ON, PIECES, TRAINS], f"Set it to [..., {LIBRARY}]"),
        (ONE_CARD, [TRAINS, LOADS], f"the rollout sums in another order without {KEY}=1"),
        (ONE_NODE, [ON, PIECES, TRAINS, LOADS], "megatron has its own attention. Set it to null"),
    ],
)
def test_settings_unsupported_by_the_mode_rejected(job, overrides, says):
    with pytest.raises(JobError) as caught:
        check_job(compose_job(job, overrides), MODELS[job])
    assert says in str(caught.value), caught.value


def test_images_rejected():
    config = check_job(compose_job(ONE_CARD, [ON, PIECES]), MODELS[ONE_CARD])
    model = MODELS[ONE_CARD] | {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    [problem, *_] = invariance_model_problems(config, model)
    assert "the mode was not run with a vision tower" in problem


def test_products_with_biases_need_this_projects_worker():
    """In Qwen2.5 `aten::linear` depends on the batch with vLLM-Ascend's own worker (see `test_search.py`)."""
    model = MODELS[ONE_CARD] | {"model_type": "qwen2"}
    config = check_job(compose_job(ONE_CARD, [ON, PIECES, TRAINS, LOADS]), model)
    assert BatchInvariance.from_config(config) == BatchInvariance(rollout=True, training=True)
    with pytest.raises(JobError, match=r"projections with biases \(aten.linear\)"):
        check_job(compose_job(ONE_CARD, [ON, PIECES, UPSTREAM]), model)


@pytest.mark.parametrize(("family", "passes"), [("qwen3_moe", True), ("qwen3_next", False)])
def test_training_with_experts_passes_for_those_of_verl(family, passes):
    config = check_job(compose_job(ONE_CARD, [ON, PIECES, TRAINS, LOADS]), MODELS[ONE_CARD])
    problems = [*invariance_model_problems(config, MODELS[ONE_NODE] | {"model_type": family})]
    assert problems == [] if passes else "adds up the experts of qwen3_next in another order" in problems[0]


def test_mixture_of_experts_passes_with_this_projects_worker():
    assert check_job(compose_job(ONE_NODE, [ON, PIECES]), MODELS[ONE_NODE])
