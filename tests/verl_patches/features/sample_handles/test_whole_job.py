"""Whole jobs on Ray with and without sample references have equal metrics, except for times, bytes and memory."""

from __future__ import annotations

import pytest

from rehearsal.resume_proof.comparison import metrics_of
from tests.rehearsal.command import rehearse

KEY = "actor_rollout_ref.overlay.sample_handles.enabled"
EIGHT_DIES = (
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
)
# Two updates per batch: old_log_prob is computed, and stays with the workers.
TWO_UPDATES = (
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
)


WITHOUT_REFERENCE = ("actor_rollout_ref.actor.use_kl_loss=false",)
# A rollout ends as soon as half of the groups are finished.
IN_PARTS = (
    "actor_rollout_ref.overlay.partial_rollout.enabled=true",
    "actor_rollout_ref.overlay.partial_rollout.threshold=0.5",
    "actor_rollout_ref.overlay.rollout_correction.enabled=true",
    "actor_rollout_ref.overlay.dp_sync.lease_steps=1",
    "actor_rollout_ref.actor.recompute_old_log_prob=true",
)


def comparable(step: dict[str, float]) -> dict[str, float]:
    """Return the metrics that do not depend on where samples are kept."""
    apart = ("timing", "perf/", "memory/", "samples/", "overlay/")
    return {name: value for name, value in step.items() if not name.startswith(apart) and "seconds" not in name}


@pytest.mark.exhaustive
@pytest.mark.parametrize("balanced", ["true", "false"])
@pytest.mark.parametrize("updates", [(), TWO_UPDATES, WITHOUT_REFERENCE])
def test_training_on_eight_dies_is_the_same(balanced, updates, tmp_path):
    found = {}
    for enabled in ("true", "false"):
        output = tmp_path / enabled
        changes = ["actor_rollout_ref.overlay.precision=float32", f"trainer.balance_batch={balanced}"]
        if updates == TWO_UPDATES:
            changes.append("actor_rollout_ref.actor.recompute_old_log_prob=true")
        rehearse(output, "--dies", "8", "--steps", "3", "--", *changes, f"{KEY}={enabled}", *EIGHT_DIES, *updates)
        found[enabled] = list(metrics_of(output).values())
    kept, sent = ([comparable(step) for step in found[enabled]] for enabled in ("true", "false"))
    assert kept == sent and len(kept) == 3 and len(kept[0]) > 40
    assert ("actor/kl_loss" in kept[0]) == (updates != WITHOUT_REFERENCE)
    assert all(step["samples/collectives"] == 1 for step in found["true"])
    # The first step also counts what came before it.
    for with_handles, without in zip(found["true"][1:], found["false"][1:], strict=True):
        assert with_handles["perf/driver_bytes_per_sample"] < 0.2 * without["perf/driver_bytes_per_sample"]


@pytest.mark.exhaustive
def test_training_on_answers_that_go_on_is_the_same(tmp_path):
    """The workers keep the answers that a step's rollout returns, including whole answers begun in earlier steps."""
    found = {}
    for enabled in ("true", "false"):
        output = tmp_path / enabled
        changes = ("actor_rollout_ref.overlay.precision=float32", "actor_rollout_ref.actor.optim.lr=0", *IN_PARTS)
        rehearse(output, "--steps", "4", "--", *changes, f"{KEY}={enabled}")
        found[enabled] = list(metrics_of(output).values())
    kept, sent = ([comparable(step) for step in found[enabled]] for enabled in ("true", "false"))
    assert kept == sent and len(kept) == 4 and len(kept[0]) > 40
    assert max(step["partial_rollout/old_share"] for step in kept) > 0.1
    assert all(step["samples/collectives"] == 1 for step in found["true"])
