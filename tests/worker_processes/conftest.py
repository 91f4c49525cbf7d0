"""One set of four processes for all tests here: verl's complete worker on a tiny float32 DeepSeek-V3."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.worker_processes import jobs
from tests.worker_processes.processes import Processes

DATA = Path(__file__).parents[2] / "data" / "arithmetic" / "train.jsonl"
PROMPTS = [[3, 10 + index, 20 + index, 30, 40 + index % 3, 4] for index in range(8)]


def random_checkpoint(folder: Path) -> Path:
    """Make a tiny DeepSeek-V3 with random float32 weights, so that no two tokens are equally likely."""
    from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint

    request = CheckpointRequest(DATA, 0, "float32", warm_start=None)
    return make_checkpoint(request, folder / "checkpoint", lambda step, loss: None).path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """Return the checkpoint with which all tests start."""
    return random_checkpoint(tmp_path_factory.mktemp("workers"))


@pytest.fixture(scope="session")
def description(checkpoint, tmp_path_factory) -> Path:
    """Return a copy of the checkpoint's configuration and tokenizer, without weights."""
    folder = tmp_path_factory.mktemp("workers") / "description"
    return shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))


def overrides(checkpoint: Path, description: Path) -> list[str]:
    """Return the overrides of the rehearsal's configuration for the processes.

    Args:
        checkpoint: the folder with the weights.
        description: configuration and tokenizer, without weights.
    """
    micro = 32
    return [
        f"actor_rollout_ref.model.path={description}",
        f"actor_rollout_ref.actor.megatron.load_from_hf={checkpoint}",
        "data.train_batch_size=8",
        "data.max_response_length=8",
        "actor_rollout_ref.rollout.temperature=0.8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.recompute_old_log_prob=true",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={micro}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={micro}",
        "actor_rollout_ref.overlay.precision=float32",
        "actor_rollout_ref.overlay.residency.rollout_addresses=reserved",
        "actor_rollout_ref.overlay.measure.output_dir=''",
        "actor_rollout_ref.overlay.expert_sets.share=1.0",
        # The jobs call workers as the driver does without sample references, whose effect has its own test.
        "actor_rollout_ref.overlay.sample_handles.enabled=false",
    ]


@pytest.fixture(scope="session")
def processes(checkpoint, description) -> Processes:
    """Yield the processes, which build actor, rollout and reference policy once."""
    with Processes() as running:
        running.report = running.run(jobs.build, overrides(checkpoint, description))[0]
        running.run(jobs.remember)
        yield running


@pytest.fixture
def workers(processes) -> Processes:
    """Return the processes in their initial state: weights, optimizer, settings, random numbers."""
    processes.run(jobs.recall)
    return processes
