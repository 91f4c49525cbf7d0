"""Two steps of unmodified verl 0.9.1 on emulated dies: updated weights reach vLLM, and a control shows if they do not.

A run resumed after its first step has the same second step, bit for bit; with FSDP2 it makes the separate forward.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rehearsal.plan import ROOT
from rehearsal.resume_proof.comparison import compare_metrics
from rehearsal.stack_2026.resume_proof import LOG_PROB_METRICS
from tests.stack_2026.rehearsals import MEAN_DIFFERENCE, STEPS, check_computes_alike, command, rehearse, summary_of
from verl_plugin.trainer_modes import MODE_KEY, MODULES_KEY, REGISTRATION

pytestmark = pytest.mark.slow
RUNS = [("megatron", "deepseek_v3", 2), ("fsdp2", "qwen3", 1)]
ONE_DIE = [f"actor_rollout_ref.{part}.megatron.expert_model_parallel_size=1" for part in ("actor", "ref")]
SECOND_FORWARD = f"{MODE_KEY}=sync"
BFLOAT16_DIFFERENCE = 0.01  # in the answers' mean log-probs; the measured value is 5.8e-4


@pytest.fixture(scope="module", params=RUNS, ids=[backend for backend, _, _ in RUNS])
def finished(request, tmp_path_factory) -> tuple[str, Path, subprocess.CompletedProcess[str]]:
    """Backend, folder and ended process of a run that saves after each step, without a separate forward."""
    backend, model, dies = request.param
    folder = tmp_path_factory.mktemp(backend) / "run"
    keys = ("trainer.save_freq=1", "+trainer.record_steps=[2]")
    return backend, folder, rehearse(folder, "--backend", backend, "--model", model, "--dies", str(dies), "--", *keys)


def test_training_and_rollout_compute_alike(finished):
    _, folder, run = finished
    check_computes_alike(run, folder)


def test_recorded_step_is_made_again_on_other_dies(finished, tmp_path):
    """Replay on one die instead of two, and on two instead of one, starting from the first step's weights."""
    backend, folder, _ = finished
    command = [sys.executable, "scripts/replay.py", folder / "checkpoints" / "records" / "step_2", "--emulate"]
    command += ["--output", tmp_path / "replay.json", "--dies", "1" if backend == "megatron" else "2"]
    # vLLM-Ascend computes DeepSeek's prefill attention in bfloat16; everything else is compared closely below.
    command += ["--tolerance", "0.01", *(f"--set={key}" for key in ONE_DIE)] if backend == "megatron" else []
    run = subprocess.run(map(str, command), cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and "Everything is as recorded." in run.stdout, run.stdout[-3000:] + run.stderr[-3000:]
    compared = json.loads((tmp_path / "replay.json").read_text())["compared"]
    assert {each["stage"] for each in compared} == {"mask", "ref", "old_log_prob", "advantages", "update"}
    assert max(each["most"] for each in compared if each["what"] != "log-probs of the rollout") < 1e-6


# By backend: a shard without which a step is incomplete, and the files with weights, optimizer averages and random
# state. They exclude pickles of Megatron-core's descriptions, which contain names drawn at each save.
SHARDS = {"fsdp2": "actor/optim_world_size_1_rank_0.pt", "megatron": "actor/optimizer/dist_ckpt/__1_0.distcp"}
MEGATRON_FILES = ("**/*.distcp", "**/*.safetensors", "data.pt")


def test_resumed_run_has_the_same_second_step(finished, tmp_path):
    """The second step's checkpoint has lost a shard, so the run resumes from the one before."""
    backend, folder, _ = finished
    copy, shard = tmp_path / "copy", SHARDS[backend]
    shutil.copytree(folder, copy)
    (copy / "checkpoints" / "global_step_2" / shard).unlink()
    run = command("--resume", str(copy), *(("--", SECOND_FORWARD) if backend == "fsdp2" else ()))
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert (
        f"global_step_2 is not complete: {shard} is missing" in run.stdout and "Continuing after step 1" in run.stdout
    )
    steps, count, differing = compare_metrics(folder, copy)
    assert steps == STEPS and count > 100
    # These differ by 1e-8 to 1e-6: rollout and training make two forwards, whose rounding differs.
    assert [name for name in differing if not name.removeprefix("step 2: ").startswith(LOG_PROB_METRICS)] == []
    first, second = (saved_state(backend, root / "checkpoints" / f"global_step_{STEPS}") for root in (folder, copy))
    assert len(first) > 3 and first == second
    earlier = saved_state(backend, folder / "checkpoints" / "global_step_1")
    assert earlier.keys() == first.keys() and earlier != first
    times = [json.loads(line)["time"] for line in (copy / "metrics.jsonl").read_text().splitlines()]
    assert times[1] > (folder / "metrics.jsonl").stat().st_mtime  # trained, not copied


def saved_state(backend: str, step: Path) -> dict[str, bytes]:
    """Return the bytes that a step saved: FSDP2's weights by name, Megatron-core's files by path."""
    if backend == "megatron":
        found = {file for pattern in MEGATRON_FILES for file in step.glob(pattern)}
        return {str(file.relative_to(step)): file.read_bytes() for file in found}
    import torch

    state = torch.load(step / "actor" / "model_world_size_1_rank_0.pt", weights_only=False)
    local = {name: each.to_local() if hasattr(each, "to_local") else each for name, each in state.items()}
    return {name: each.cpu().contiguous().view(torch.uint8).numpy().tobytes() for name, each in local.items()}


def test_weights_that_do_not_arrive_fail_the_run(tmp_path):
    """The user's module, which discards them, is loaded in forked workers too."""
    own = f"{MODULES_KEY}='{REGISTRATION},tests.stack_2026.verl.without_weights'"
    small = ("--backend", "fsdp2", "--model", "qwen3", "--dies", "1", "--steps", "1", "--weights", "naive")
    run = rehearse(tmp_path / "run", *small, "--", own)
    assert run.returncode == 1 and "Rollout and training compute differently at step 1" in run.stderr
    assert summary_of(tmp_path / "run")["rollout_log_prob_diff_mean"] > 1000 * MEAN_DIFFERENCE


def test_float32_shards_of_fsdp2_trained_in_bfloat16(tmp_path):
    """FSDP2 casts its shards with aclnnForeachCopy, which converts between these types from CANN 9.1.0 on."""
    small = ("--backend", "fsdp2", "--model", "qwen3", "--dies", "2", "--steps", "1")
    run = rehearse(tmp_path / "run", *small, "--precision", "bfloat16")
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    summary = summary_of(tmp_path / "run")
    assert summary["precision"] == "bfloat16" and 0 < summary["rollout_log_prob_diff_mean"] < BFLOAT16_DIFFERENCE
    processes = [json.loads(path.read_text())["operators"] for path in (tmp_path / "run" / "meters").glob("*.json")]
    assert sum("aclnnForeachCopy" in operators for operators in processes) == 2  # the training ranks
