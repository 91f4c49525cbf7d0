"""The processor of the tiny model that reads images: its tokenizer, and how an image becomes patches."""

from __future__ import annotations

from transformers import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from rehearsal.image_task import IMAGE_SIZE
from rehearsal.tiny_model.tokenizer import END, IMAGE_CHAT_TEMPLATE, build_image_tokenizer

# vLLM computes an image of this size before it counts the blocks of its cache.
_LARGEST_SIZE = 2 * IMAGE_SIZE


def build_processor(end: str = END) -> Qwen2_5_VLProcessor:
    """Return the processor: patches and normalisation are the published models', the largest image is smaller.

    Args:
        end: the name of the tokenizer's end token.
    """
    limits = {"min_pixels": IMAGE_SIZE**2, "max_pixels": _LARGEST_SIZE**2}
    return Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(**limits),
        build_image_tokenizer(end),
        Qwen2VLVideoProcessor(**limits),
        chat_template=IMAGE_CHAT_TEMPLATE,
    )
