"""Checks of a job whose model reads images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from post_training.models.families import ModelFamily
from post_training.report.run_folder import at
from verl_plugin.sentences import invalid
from verl_plugin.step_record.checks import STEPS
from verl_plugin.trainer_modes import MODE_KEY, ONE_FORWARD, SEPARATE

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_STRATEGY, _PACKED = f"{_ACTOR}.strategy", f"{_MODEL}.use_remove_padding"
_TOWERS = "actor_rollout_ref.rollout.engine_kwargs.vllm.mm_encoder_tp_mode"
_FILES, _VIDEOS = ("data.train_files", "data.val_files"), "data.video_key"
_RESUME = "trainer.resume_mode"
_TURNS = "actor_rollout_ref.rollout.multi_turn"
# Keys with which an agent loop calls tools, and their values without one.
_TOOLS = (
    ("actor_rollout_ref.rollout.agent.default_agent_loop", "single_turn_agent"),
    (f"{_TURNS}.function_tool_path", None),
    (f"{_TURNS}.tool_config_path", None),
)


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
    towers = at(config, _TOWERS)
    if towers not in (None, "weights"):
        yield invalid(_TOWERS, towers, "alltoallv splits the vision tower over tensor parallel ranks", "weights")
    for key, without in _TOOLS:
        if (tool := at(config, key)) != without:
            reason = "with images only one turn without tools was rehearsed, and no tool that returns pictures"
            yield invalid(key, tool, reason, "null" if without is None else without)
    if at(config, MODE_KEY) == SEPARATE:
        yield invalid(MODE_KEY, SEPARATE, "images were not rehearsed with dies that only generate", ONE_FORWARD)
    if (resumed := at(config, _RESUME)) != "disable":
        yield invalid(_RESUME, resumed, "no run with images has been resumed", "disable")
    if steps := at(config, STEPS):
        yield invalid(STEPS, steps, "positions of images are not recorded", "null")
    yield from _video_problems(config)


def _video_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each file on this machine with a column of videos."""
    column = at(config, _VIDEOS) or "videos"  # verl's default
    for key in _FILES:
        files = at(config, key) or []
        for file in [files] if isinstance(files, str) else files:
            path = Path(str(file)).expanduser()
            try:
                names = pyarrow.parquet.read_schema(path).names if path.is_file() else []
            except (pyarrow.ArrowException, OSError):
                continue  # the check of data names it
            if column in names:
                reason = f"{file} has that column, and videos were not rehearsed"
                yield invalid(_VIDEOS, column, reason, "a name that no column has, to train without videos")
