"""Patch of verl's processor for Qwen2.5-VL: verl's data set recognises it, and its pixels are those of the rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.compatibility.feature import IMAGES

if TYPE_CHECKING:
    from transformers import ProcessorMixin


@wrap(
    "verl.utils.tokenizer:hf_processor",
    feature=IMAGES,
    evidence="executed",
    why="verl asks for the fast image processor, whose name its data set does not know: positions of images get one "
    "part instead of three, and training computes other log-probs than the rollout",
    upstream="not forwarded: only verl compares the name",
    remove_when="the pinned verl gives positions in three parts for Qwen2VLImageProcessorFast",
)
def hf_processor(
    upstream: Callable[..., ProcessorMixin | None], name_or_path: str, **options: Any
) -> ProcessorMixin | None:
    processor = upstream(name_or_path, **options)
    images = getattr(processor, "image_processor", None)
    if processor is not None and type(images).__name__ == "Qwen2VLImageProcessorFast":
        from transformers import AutoImageProcessor

        processor.image_processor = AutoImageProcessor.from_pretrained(name_or_path, use_fast=False)
    return processor
