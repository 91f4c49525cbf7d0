"""The forms in which MindSpeed-LLM v2.0.0 stores DeepSeek-V3, beyond the one with which this project trains.

They are derived from the sharding spec `models/deepseek_v3.py`: its shards are divided further or renamed, never
redefined.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from post_training.layouts.layout import LocalView, Shard, TrainPlacement, share, vocabulary_shards, whole_slice
from post_training.models.deepseek_v3 import DeepseekV3Shape, hf_shapes, megatron, mtp_shapes


@dataclass(frozen=True)
class MegatronForm:
    """A form of shards.

    Attributes:
        placement: with dp equal to ep, so that every rank has a file of its own.
        mla_mm_split: linear_qb is split into two weights, without and with the rotary part, and linear_kvb into keys
            and values.
        moe_grouped_gemm: all experts of a layer in weight1 and weight2; otherwise local_experts.N.
        mtp_layers: number of layers for multi-token prediction that are kept, 0 or 1.
    """

    placement: TrainPlacement
    mla_mm_split: bool = False
    moe_grouped_gemm: bool = True
    mtp_layers: int = 0

    def __post_init__(self) -> None:
        if self.placement.dp != self.placement.ep:
            raise ValueError("the placement of files needs dp equal to ep")
        if self.placement.moe_tp_extend_ep and not self.moe_grouped_gemm:
            raise ValueError(
                "moe-tp-extend-ep needs moe-grouped-gemm: without it MindSpeed-LLM's converter splits the joined gate "
                "and up projection of an expert in the middle, and no model can train from such shards"
            )
        if self.mtp_layers > 1:
            raise ValueError(f"at most one layer for multi-token prediction can be kept, not {self.mtp_layers}")

    def as_arguments(self) -> dict[str, Any]:
        """Return the form as plain values, for a manifest."""
        values = asdict(self)
        values["placement"]["num_layer_list"] = list(self.placement.num_layer_list)
        return values

    @classmethod
    def from_arguments(cls, values: dict[str, Any]) -> "MegatronForm":
        """Read the values that `as_arguments` returns."""
        placement = values["placement"] | {"num_layer_list": tuple(values["placement"]["num_layer_list"])}
        return cls(**(values | {"placement": TrainPlacement(**placement)}))


def all_shapes(shape: DeepseekV3Shape, mtp_layers: int) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every HF tensor that the form stores."""
    return hf_shapes(shape) | (mtp_shapes(shape, shape.layers) if mtp_layers else {})


def mtp_prefix(shape: DeepseekV3Shape) -> str:
    """Return the prefix of the names of the first layer for multi-token prediction."""
    return f"model.layers.{shape.layers}."


def mtp_aliases(shape: DeepseekV3Shape) -> dict[str, str]:
    """Return the tensors of multi-token prediction that equal one of the model, with that one's name.

    They are embedding and head, which HuggingFace files store again.
    """
    prefix = mtp_prefix(shape)
    return {
        f"{prefix}embed_tokens.weight": "model.embed_tokens.weight",
        f"{prefix}shared_head.head.weight": "lm_head.weight",
    }


def rank_shards(shape: DeepseekV3Shape, form: MegatronForm, rank: int) -> list[Shard]:
    """Return the shards of one rank. Raises ValueError if the layout does not fit the model."""
    shards = megatron(shape, form.placement, rank)
    if form.mtp_layers and form.placement.pp_rank(rank) == form.placement.pp - 1:
        shards = _with_mtp(shape, form.placement, rank, shards)
    if form.mla_mm_split:
        shards = [part for shard in shards for part in _split_heads(shape, shard)]
    if not form.moe_grouped_gemm:
        shards = [_single_expert(shard) for shard in shards]
    return shards


def _with_mtp(shape: DeepseekV3Shape, placement: TrainPlacement, rank: int, shards: list[Shard]) -> list[Shard]:
    """Return the last stage's shards with one more layer, in mtp_layers.0; the final norm moves out of the decoder."""
    chunk = placement.chunk_prefix(placement.virtual_stages - 1)
    local, prefix, tp, tp_rank = f"{chunk}mtp_layers.0.", mtp_prefix(shape), placement.tp, placement.tp_rank(rank)
    *first, last = placement.num_layer_list
    deeper = replace(placement, num_layer_list=(*first, last + 1))
    for shard in megatron(replace(shape, layers=shape.layers + 1), deeper, rank):
        if shard.hf_name.startswith(prefix):
            inner = shard.local.removeprefix(f"{chunk}decoder.layers.{last}.")
            shards.append(replace(shard, local=f"{local}transformer_layer.{inner}"))
    norms = {"enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "final_layernorm"}
    for name, own in norms.items():
        shards.append(Shard(f"{prefix}{name}.weight", whole_slice((shape.hidden,)), f"{local}{own}.weight"))
    rows = share(shape.hidden, tp, tp_rank, f"{prefix}eh_proj.weight")
    shards.append(Shard(f"{prefix}eh_proj.weight", (rows, (0, 2 * shape.hidden)), f"{local}eh_proj.weight"))
    if placement.pp > 1:
        rows = share(shape.vocab, tp, tp_rank, "vocabulary rows over tensor parallel ranks")
        name = f"{local}embedding.word_embeddings.weight"
        shards += vocabulary_shards(f"{prefix}embed_tokens.weight", name, shape.vocab, shape.hidden, rows)
    norm = f"{chunk}decoder.final_layernorm.weight"
    return [replace(p, local=f"{chunk}final_layernorm.weight") if p.local == norm else p for p in shards]


def _split_heads(shape: DeepseekV3Shape, shard: Shard) -> Iterator[Shard]:
    """Yield the rows of linear_qb and linear_kvb head by head, in the weights of MindSpeed-LLM's mla-mm-split."""
    splits = {
        "linear_qb.weight": (("linear_qk_nope.weight", shape.qk_nope), ("linear_qk_rope.weight", shape.qk_rope)),
        "linear_kvb.weight": (("linear_kv_nope.weight", shape.qk_nope), ("linear_v.weight", shape.v_head)),
    }
    name = next((name for name in splits if shard.local.endswith(f"self_attention.{name}")), None)
    if name is None:
        yield shard
        return
    local, (first, last) = shard.local.removesuffix(name), shard.bounds[0]
    width = sum(rows for _, rows in splits[name])
    if first % width or last % width:
        raise ValueError(f"{shard.local}: mla-mm-split needs whole heads on every tensor parallel rank")
    for head in range((last - first) // width):
        start = first + head * width
        for own, rows in splits[name]:
            bounds = ((start, start + rows), shard.bounds[1])
            yield Shard(shard.hf_name, bounds, local + own, LocalView(index=((head * rows, (head + 1) * rows),)))
            start += rows


def _single_expert(shard: Shard) -> Shard:
    """Map an expert's part of weight1 or weight2 to the weight of its own module, which is not transposed."""
    module, _, weight = shard.local.rpartition(".")
    if not module.endswith(".experts"):
        return shard
    slot, *rest = shard.view.index
    expert = f"{module}.local_experts.{slot}."
    if weight == "weight2":
        return replace(shard, local=f"{expert}linear_fc2.weight", view=LocalView())
    return replace(shard, local=f"{expert}linear_fc1.weight", view=LocalView(index=(rest[1],)))


def local_shapes(shards: Iterable[Shard]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every local tensor, computed from the shards that fill it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        if shard.view.shape is not None:
            count, rows, columns = shard.view.shape
            grouped = (rows, count * columns) if shard.local.endswith("weight1") else (count * rows, columns)
            shapes[shard.local] = grouped
            continue
        leading = shard.view.index[0] if shard.view.index else (0, shard.extents[0])
        stop = leading + 1 if isinstance(leading, int) else leading[1]
        known = shapes.get(shard.local, (0,))
        shapes[shard.local] = (max(known[0], stop), *shard.extents[1:])
    return shapes
