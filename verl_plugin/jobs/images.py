"""Checks of a job whose model reads images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from post_training.models.families import ModelFamily
from post_training.report.run_folder import at
from verl_plugin.sentences import invalid

_ACTOR, _REF, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "model"))
_STRATEGY, _PACKED = f"{_ACTOR}.strategy", f"{_MODEL}.use_remove_padding"
_TOWERS = "actor_rollout_ref.rollout.engine_kwargs.vllm.mm_encoder_tp_mode"
_ULYSSES = tuple(f"{part}.fsdp_config.ulysses_sequence_parallel_size" for part in (_ACTOR, _REF))


def image_problems(config: Mapping[str, Any], family: ModelFamily) -> Iterator[str]:
    """Yield an error for each setting that was not rehearsed with images; none for a family that reads text only."""
    if not family.reads_images:
        return
    if at(config, _STRATEGY) != "fsdp2":
        reason = f"alltoallv has no layout of {family.name} in Megatron"
        yield invalid(_STRATEGY, at(config, _STRATEGY), reason, "fsdp2")
    if at(config, _PACKED):
        reason = "verl's attention for packed batches of this model computes in 16 bits, and is not tested"
        yield invalid(_PACKED, True, reason, "false")
    for key in _ULYSSES:
        if (size := at(config, key) or 1) > 1:
            yield invalid(key, size, "images are tested only with padded batches, which it does not share", "1")
    towers = at(config, _TOWERS)
    if towers not in (None, "weights"):
        yield invalid(_TOWERS, towers, "alltoallv splits the vision tower over tensor parallel ranks", "weights")
