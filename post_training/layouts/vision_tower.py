"""The layout of Qwen2.5-VL's vision tower: HF names are those of its published files, and of vLLM as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from post_training.layouts.layout import LocalView, Shard, cut_shard, share, whole_slice

PREFIX = "visual."
_GATES = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class VisionShape:
    """The sizes that determine every tensor shape.

    Attributes:
        merged: patches that are merged into one vision token, along one dimension.
        output: width of a vision token, which is the hidden size of the language model.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    channels: int
    patch: int
    frames: int
    merged: int
    output: int

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> Self:
        """Read `vision_config` of a config.json. Raises KeyError if a size is missing."""
        return cls(
            hidden=values["hidden_size"],
            intermediate=values["intermediate_size"],
            layers=values["depth"],
            heads=values["num_heads"],
            channels=values.get("in_channels", values.get("in_chans", 3)),
            patch=values["patch_size"],
            frames=values["temporal_patch_size"],
            merged=values["spatial_merge_size"],
            output=values["out_hidden_size"],
        )

    @property
    def merger(self) -> int:
        """Width of the patches that become one vision token."""
        return self.hidden * self.merged**2


def hf_shapes(shape: VisionShape) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every HuggingFace tensor."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{PREFIX}patch_embed.proj.weight": (shape.hidden, shape.channels, shape.frames, shape.patch, shape.patch)
    }
    for layer in range(shape.layers):
        block = f"{PREFIX}blocks.{layer}."
        shapes |= {f"{block}{norm}.weight": (shape.hidden,) for norm in ("norm1", "norm2")}
        shapes |= _linear(f"{block}attn.qkv", 3 * shape.hidden, shape.hidden)
        shapes |= _linear(f"{block}attn.proj", shape.hidden, shape.hidden)
        for name in _GATES:
            shapes |= _linear(f"{block}mlp.{name}", shape.intermediate, shape.hidden)
        shapes |= _linear(f"{block}mlp.down_proj", shape.hidden, shape.intermediate)
    merger = f"{PREFIX}merger."
    shapes[f"{merger}ln_q.weight"] = (shape.hidden,)
    shapes |= _linear(f"{merger}mlp.0", shape.merger, shape.merger)
    return shapes | _linear(f"{merger}mlp.2", shape.output, shape.merger)


def _linear(name: str, out: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, inputs), f"{name}.bias": (out,)}


def vllm_ascend(shape: VisionShape, tp: int, tp_rank: int) -> list[Shard]:
    """Return the shards of one rollout rank.

    Raises:
        ValueError: a width does not divide over the ranks.
    """
    shards = []
    for name, dims in hf_shapes(shape).items():
        module = name.rpartition(".")[0]
        if module.endswith("attn.qkv"):
            shards += _stacked_qkv(shape, name, dims, tp, tp_rank)
        elif module.endswith((*_GATES, "merger.mlp.0")):
            shards.append(cut_shard(name, dims, name, 0, tp, tp_rank))
        elif name.endswith(("attn.proj.weight", "down_proj.weight", "mlp.2.weight")):
            shards.append(cut_shard(name, dims, name, 1, tp, tp_rank))
        else:
            shards.append(Shard(name, whole_slice(dims), name))
    return shards


def _stacked_qkv(shape: VisionShape, name: str, dims: tuple[int, ...], tp: int, tp_rank: int) -> list[Shard]:
    """Return a rank's fused rows: its heads of the query, then of the key, then of the value.

    >>> shape = VisionShape(4, 1, 1, heads=4, channels=3, patch=1, frames=1, merged=1, output=1)
    >>> [(shard.bounds[0], shard.view.index[0]) for shard in _stacked_qkv(shape, "", (12,), 2, 1)]
    [((2, 4), (0, 2)), ((6, 8), (2, 4)), ((10, 12), (4, 6))]
    """
    first, last = share(shape.heads, tp, tp_rank, f"{name}: heads over tensor parallel ranks")
    width = shape.hidden // shape.heads
    rows = (last - first) * width
    shards = []
    for part in range(3):
        start = part * shape.hidden + first * width
        bounds = ((start, start + rows), *whole_slice(dims[1:]))
        shards.append(Shard(name, bounds, name, LocalView(index=((part * rows, (part + 1) * rows),))))
    return shards
