"""Ranks that share sequences compute what one rank computes, with verl's engine and MindSpeed's ring attention.

The referee is transformers with torch's autograd and AdamW, in float32.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from post_training.processes.command import SignalFlag
from rehearsal.stack_2026.resume_proof import STEPS, Proof
from tests.ranks import run_ranks
from tests.stack_2026.checkpoints import make_checkpoints
from tests.stack_2026.rehearsals import check_computes_alike, rehearse
from tests.stack_2026.upstream.context_parallel_cases import SAMPLES, Case
from tests.stack_2026.upstream.test_mindspeed import environment_with, paths  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Largest difference, in float32, of a loss and of gradients up to 1, and of log-probs near -6, whose last bit is 5e-7.
TOLERANCE, LOG_PROBS = 1e-6, 3e-6
# Weights that one step of Adam moves by 1e-2; the step divides by the root of the gradient's square.
WEIGHTS = 5e-6
PLANTED = 1e-3
COMPARED, DIFFER, REPLACED = (f"rollout/expert_sets_{name}" for name in ("compared", "differ", "replaced"))
# The update would move the bias of DeepSeek-V3's routers too.
FIXED = {"moe_router_bias_update_rate": 0.0}
LATENT = FIXED | {"multi_latent_attention": True}
# Three layers, the first two in the first stage.
LAYERS = {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 1}
# By number of ranks.
CASES = {
    1: [
        Case("qwen3 alone", "qwen3"),
        Case("qwen3_moe alone", "qwen3_moe"),
        Case("deepseek_v3 alone", "deepseek_v3", transformer=FIXED),
    ],
    2: [
        Case("qwen3 shared", "qwen3", context=2),
        Case("qwen3 distributed", "qwen3", context=2, distributed=True),
        Case("qwen3 chunks", "qwen3", context=2, fault="chunks"),
        Case("qwen3 tokens", "qwen3", context=2, fault="tokens"),
        Case("qwen3_moe shared", "qwen3_moe", context=2, expert=2),
        Case("qwen3_moe replayed", "qwen3_moe", context=2, expert=2, replay=True),
        Case("deepseek_v3 shared", "deepseek_v3", context=2, expert=2, transformer=LATENT),
    ],
    4: [
        Case("qwen3 replicas", "qwen3", context=2),
        Case("qwen3 distributed replicas", "qwen3", context=2, distributed=True),
        Case("qwen3 all four", "qwen3", context=4),
        Case("qwen3 stages", "qwen3", context=2, pipeline=2),
        Case("qwen3_moe replicas", "qwen3_moe", context=2, expert=4),
        # MindSpeed keeps the layers of stages, so these come last.
        Case("qwen3_moe stages", "qwen3_moe", context=2, pipeline=2, expert=2, transformer=LAYERS),
    ],
}
# On four ranks too, of their own: MindSpeed keeps a process's first tensor-parallel size. DeepSeek-V3 needs 1 with it
# (docs/upstream/mindspeed-duplicated-linear.md).
SHARDS = [
    Case("qwen3 shards", "qwen3", context=2, tensor=2),
    Case("qwen3_moe shards", "qwen3_moe", context=2, tensor=2, expert=2),
]
_MEGATRON = "actor_rollout_ref.actor.megatron"
TWO = (f"{_MEGATRON}.context_parallel_size=2", "actor_rollout_ref.ref.megatron.context_parallel_size=2")
OF_DEEPSEEK = f"+{_MEGATRON}.override_transformer_config.multi_latent_attention=true"
# It keeps the kind of attention too.
OF_LATENT = [
    Case("deepseek_v3 replicas", "deepseek_v3", context=2, expert=2, transformer=LATENT),
    Case("deepseek_v3 stages", "deepseek_v3", context=2, pipeline=2, expert=2, transformer=LATENT | LAYERS),
]
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    make_checkpoints(folder)
    return folder


def run(folder: Path, paths: list[str], world: int, cases: list[Case]) -> Found:  # noqa: F811
    """Run cases on `world` ranks, and return the results of all ranks by name of the case."""
    (folder / "cases.json").write_text(json.dumps([dataclasses.asdict(case) for case in cases]))
    environment = environment_with(paths, folder) | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "path", [*paths, *sys.path])
        run_ranks("tests.stack_2026.upstream.context_parallel_program", world, folder, timeout=900)
    names = [case.name for case in cases]
    files = {name: [folder / f"{name}.{rank}.json" for rank in range(world)] for name in names}
    return {name: [json.loads(file.read_text()) for file in found] for name, found in files.items()}


@pytest.fixture(scope="module")
def alone(folder, paths) -> Found:  # noqa: F811
    return run(folder, paths, 1, CASES[1])


@pytest.fixture(scope="module")
def shared(folder, paths) -> Found:  # noqa: F811
    return run(folder, paths, 2, CASES[2])


@pytest.fixture(scope="module")
def four(folder, paths) -> Found:  # noqa: F811
    return run(folder, paths, 4, CASES[4])


@pytest.fixture(scope="module")
def shards(folder, paths) -> Found:  # noqa: F811
    return run(folder, paths, 4, SHARDS)


@pytest.fixture(scope="module")
def latent(folder, paths) -> Found:  # noqa: F811
    return run(folder, paths, 4, OF_LATENT)


def largest(found: list[dict[str, Any]], name: str) -> float:
    """Return the largest difference of a kind on all ranks that have it."""
    return max(each[name] for each in found if name in each)


def check_exact(found: Found, cases: list[Case], paths: list[str]) -> None:  # noqa: F811
    """Check that each case computes as transformers does."""
    for case in (case for case in cases if not case.fault):
        ranks = found[case.name]
        assert all(each["mindspeed"].startswith(paths[0]) for each in ranks)
        assert {each["attention"] for each in ranks} == {ATTENTION[case.context > 1]}, ranks[0]
        # Replicas divide the samples, and each has its part of the mean.
        losses = [each["loss"] for each in ranks if each["sources"]]
        assert abs(sum(losses) - ranks[0]["expected_loss"]) < TOLERANCE, (case, losses)
        assert largest(ranks, "log_probs") < LOG_PROBS, (case, largest(ranks, "log_probs"))
        for name in ("norm", *([] if case.distributed else ["gradients"])):
            assert largest(ranks, name) < TOLERANCE, (case, name, largest(ranks, name))
        assert largest(ranks, "offered") == 0, case  # to the rollout, by alltoallv
        assert largest(ranks, "weights") < WEIGHTS, (case, largest(ranks, "weights"))


ATTENTION = {False: "TEDotProductAttention", True: "MindSpeedCPDotProductAttention"}


def test_whole_sequences_compute_as_transformers(alone, paths):  # noqa: F811
    check_exact(alone, CASES[1], paths)


def test_shared_sequences_compute_as_transformers(shared, paths):  # noqa: F811
    check_exact(shared, CASES[2], paths)


def test_shared_sequences_with_replicas_and_stages_compute_as_transformers(four, latent, paths):  # noqa: F811
    check_exact(four, CASES[4], paths)
    check_exact(latent, OF_LATENT, paths)


def test_shared_sequences_with_tensor_shards_compute_as_transformers(shards, paths):  # noqa: F811
    check_exact(shards, SHARDS, paths)


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_gradients_of_shared_sequences_are_those_of_whole_ones(alone, shared, folder, model):
    whole, parts = (safetensors.torch.load_file(folder / f"{model} {how}.safetensors") for how in ("alone", "shared"))
    assert whole.keys() == parts.keys() and any(name.startswith("gradients/") for name in whole)
    apart = {name: (each - parts[name]).abs().max().item() for name, each in whole.items()}
    gradients = [name for name in apart if name.startswith("gradients/")]
    assert max(apart[name] for name in gradients) < TOLERANCE
    assert max(whole[name].abs().max() for name in gradients) > 1000 * TOLERANCE
    assert max(apart.values()) < WEIGHTS


def test_experts_of_the_rollout_are_replayed(shared):
    [metrics] = [each["experts"] for each in shared["qwen3_moe replayed"] if each["sources"]]
    # Each of three layers, in a forward and an update; the rollout does not compute the last token.
    assert metrics[COMPARED] == 2 * 3 * sum(prompt + answer - 1 for prompt, answer in SAMPLES)
    assert metrics[DIFFER] == 0 and metrics[REPLACED] > 0.9


@pytest.mark.parametrize("fault", ["chunks", "tokens"])
def test_planted_faults_are_noticed(shared, fault):
    found = shared[f"qwen3 {fault}"]
    assert largest(found, "gradients") > PLANTED
    assert fault == "tokens" or largest(found, "log_probs") > PLANTED


@pytest.mark.parametrize(("model", "more"), [("qwen3", ()), ("deepseek_v3", (OF_DEEPSEEK,))])
def test_grpo_steps_with_shared_sequences_compute_as_the_rollout(paths, tmp_path, model, more):  # noqa: F811
    """Two replicas of two ranks that share sequences; without a second forward, with offloading and exact weights."""
    arguments = ("--backend", "mindspeed", "--model", model, "--dies", "4", "--", *TWO, *more)
    run = rehearse(tmp_path / "run", *arguments, **environment_with(paths, tmp_path))
    check_computes_alike(run, tmp_path / "run")


def test_killed_job_with_shared_sequences_resumes_as_the_unbroken_one(paths, tmp_path, monkeypatch):  # noqa: F811
    """The job of 128 dies, scaled down to two stages of two ranks that share sequences."""
    for name, value in environment_with(paths, tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NPU_EMULATOR_STRICT", raising=False)
    monkeypatch.delenv("NPU_EMULATOR_NODE", raising=False)
    sizes = (*TWO, f"{_MEGATRON}.tensor_model_parallel_size=1")
    proof = Proof("qwen3_235b_a22b_128_dies", sizes, tmp_path / "proof", ("--backend", "mindspeed"))
    found = proof.carry_out(SignalFlag())
    assert found.steps == STEPS and found.differing == ()
