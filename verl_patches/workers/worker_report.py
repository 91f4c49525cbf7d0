"""A worker's records at the end of its start and of every update, for all back-ends."""

from __future__ import annotations

from typing import Any

import overlay
from verl_patches.features.critic.warmup import ends_step
from verl_patches.features.measure.feature import MeasureSettings
from verl_patches.features.measure.run_files import RunFiles
from verl_patches.workers.process_residency import process_residency


def report_start(worker: Any, measure: MeasureSettings) -> None:
    """Write which patches are effective, and that the model of verl's worker is ready; the first rank writes for all.

    Raises:
        EffectiveError: a patch is not effective.
    """
    report = overlay.assert_effective()
    if worker.rank != 0:
        return
    files = RunFiles(measure.output_dir)
    files.overlay(report.as_dict())
    files.note("rollout_ready" if worker._is_rollout else "reference_ready")


def finish_update(metrics: dict[str, Any], rank: int, measure: MeasureSettings) -> None:
    """Add the metrics of the step, agreed over the ranks, to the metrics of an update. Collective."""
    from verl_patches.features.expert_sets.records import process_choices
    from verl_patches.features.measure.step_record import current_record, finish_step

    report, record = overlay.report(), current_record()
    record.count("overlay/patches_applied", len(report.applied))
    record.count("overlay/patches_ineffective", len(report.applied) - sum(report.effective.values()))
    files = RunFiles(measure.output_dir)
    files.memory(rank, record.peak_bytes, record.allocated_bytes)
    agreed = finish_step() | process_choices().metrics()
    if "reshard/weights_differing" in agreed:
        agreed["reshard/weights_exact"] = float(agreed["reshard/weights_differing"] == 0)
    metrics.update(agreed)
    files.executed(overlay.executed())


def finish_warmup(data: Any, metrics: dict[str, Any], rank: int, measure: MeasureSettings) -> None:
    """Finish the step after the critic's update by the batch `data`, if no update of the actor follows. Collective."""
    if ends_step(data.meta_info):
        process_residency().close()
        finish_update(metrics, rank, measure)


def compare_log_probs(batch: Any) -> None:
    """Record the distance of the rollout's log-probs to the actor's own, if the batch of an update has both.

    Args:
        batch: tensors by name: `responses` [sequences, length], `attention_mask` and the log-probs of its tokens.
    """
    from verl_patches.features.measure.step_record import current_record

    if not {"rollout_log_probs", "old_log_probs"} <= set(batch.keys()):
        return
    mask = batch["attention_mask"][:, -batch["responses"].size(1) :]
    current_record().difference.add(batch["rollout_log_probs"], batch["old_log_probs"], mask)
