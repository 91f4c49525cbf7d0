"""Decides which checkpoints of a run may be deleted once a newer one is complete."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from verl_patches.features.training_checkpoint.feature import CheckpointSettings, KeepBest


def steps_to_delete(steps: Collection[int], keep: CheckpointSettings, scores: Mapping[int, float]) -> list[int]:
    """Return those of `steps`, oldest first, that no rule keeps; the newest is always kept.

    Args:
        steps: steps with checkpoints.
        keep: the rules.
        scores: the value of `keep.keep_best.metric`, by step, for steps that have one. On a tie the newer step wins.
    """
    if not keep.keep_last:
        return []
    newest_first = sorted(steps, reverse=True)
    kept = set(newest_first[: keep.keep_last])
    if keep.keep_every:
        kept |= {step for step in newest_first if step % keep.keep_every == 0}
    sign = 1 if keep.keep_best.mode == "min" else -1
    if keep.keep_best.metric:
        scored = [step for step in newest_first if step in scores]
        kept |= set(sorted(scored, key=lambda step: sign * scores[step])[: keep.keep_best.count])
    return sorted(set(steps) - kept)


def score_of(best: KeepBest, metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the score to keep in a checkpoint, the metric's name and its value in a step; None if it has no value."""
    value = metrics.get(best.metric) if best.metric else None
    return None if value is None or value != value else {"metric": best.metric, "value": float(value)}
