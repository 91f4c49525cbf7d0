"""Qwen2.5-VL: a decoder of Qwen2.5 whose prompts may contain images, and the vision tower that reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from post_training.layouts import grouped_query, vision_tower
from post_training.layouts.grouped_query import GroupedQueryShape
from post_training.layouts.layout import RolloutPlacement, Shard, Table, TrainPlacement
from post_training.layouts.vision_tower import VisionShape
from post_training.models.families import ModelFamily
from post_training.models.sentences import invalid, reject
from post_training.models.sizes import ModelSizes, VisionSizes, grouped_attention_sizes

# Prefix in vLLM's model, in which the decoder is a module of its own.
_DECODER = "language_model."
_AGAIN = "Copy the file again"
_VISION_SIZES = (
    "depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size", "patch_size", "spatial_merge_size",
    "temporal_patch_size",
)  # fmt: skip
_LARGEST = 1 << 20


def _table(config: Mapping[str, Any]) -> Table:
    text, vision = GroupedQueryShape.from_config(config, bias=True), _vision(config)
    decoder = grouped_query.table(text)

    def rollout(placement: RolloutPlacement, rank: int) -> list[Shard]:
        shards = decoder.vllm_ascend(placement, rank)
        own = [replace(shard, local=f"{_DECODER}{shard.local}") for shard in shards]
        return own + vision_tower.vllm_ascend(vision, placement.tp, placement.tp_rank(rank))

    return replace(
        decoder,
        shapes={**decoder.shapes, **vision_tower.hf_shapes(vision)},
        megatron=_no_megatron,
        vllm_ascend=rollout,
    )


def _no_megatron(placement: TrainPlacement, rank: int) -> list[Shard]:
    raise ValueError("Qwen2.5-VL is trained with FSDP, because verl has no Megatron model for it")


def _vision(config: Mapping[str, Any]) -> VisionShape:
    """Return the sizes of the tower. Raises ValueError for sizes that no tower of this decoder has."""
    reject(_vision_findings(config))
    return VisionShape.from_config(config["vision_config"])


def _sizes(config: Mapping[str, Any]) -> ModelSizes:
    vision, decoder = _vision(config), grouped_attention_sizes(config, dense_layers=config["num_hidden_layers"])
    tower = VisionSizes(
        depth=vision.layers,
        hidden=vision.hidden,
        intermediate=vision.intermediate,
        heads=vision.heads,
        patch=vision.channels * vision.frames * vision.patch**2,
        patches_per_token=vision.merged**2,
        block=f"{vision_tower.PREFIX}blocks.0.",
    )
    return replace(decoder, vision=tower)


def _variants(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence if decoder and vision tower do not fit together, or positions do not have three parts."""
    yield from _vision_findings(config)
    if not _is_size(config.get("hidden_size")) or not _is_size(config.get("num_attention_heads")):
        return  # another rule rejects that
    scaling = config.get("rope_scaling") or config.get("rope_parameters")  # the name in transformers 5's own files
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    section = scaling.get("mrope_section") if isinstance(scaling, Mapping) else None
    if not isinstance(section, list) or len(section) != 3 or not all(map(_is_size, section)) or sum(section) != half:
        reason = f"mrope_section must be three numbers that add up to {half}, half the width of a head"
        yield invalid("rope_scaling", scaling, reason, _AGAIN)


def _vision_findings(config: Mapping[str, Any]) -> Iterator[str]:
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        yield invalid("vision_config", vision, "it must describe the vision tower", _AGAIN)
        return
    for name in _VISION_SIZES:
        if not _is_size(vision.get(name)):
            reason = f"a vision tower needs a number from 1 to {_LARGEST}"
            yield invalid(f"vision_config.{name}", vision.get(name), reason, _AGAIN)
            return
    if vision["hidden_size"] % (4 * vision["num_heads"]):
        reason = f"each of its {vision['num_heads']} heads needs rotary angles for rows and columns"
        yield invalid("vision_config.hidden_size", vision["hidden_size"], reason, _AGAIN)
    if vision["out_hidden_size"] != config.get("hidden_size"):
        reason = f"a vision token must be as wide as the decoder's hidden_size={config.get('hidden_size')}"
        yield invalid("vision_config.out_hidden_size", vision["out_hidden_size"], reason, _AGAIN)
    if vision.get("hidden_act", "silu") != "silu":
        yield invalid("vision_config.hidden_act", vision["hidden_act"], "only silu is supported", _AGAIN)


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _LARGEST


FAMILY = ModelFamily(
    name="Qwen2.5-VL",
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_types=("qwen2_5_vl",),
    table=_table,
    sizes=_sizes,
    positive=("num_key_value_heads",),
    variants=_variants,
    trained_with=("fsdp",),
    reads_images=True,
)
