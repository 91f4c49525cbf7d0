"""The forms in which MindSpeed-LLM v2.0.0 keeps DeepSeek-V3, beyond the one that this project trains with.

Derived from the layout table `models/deepseek_v3.py`: its pieces are cut further or renamed, never written anew.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from post_training.layouts.layout import LocalView, Piece, TrainPlacement, share, vocabulary_pieces, whole_box
from post_training.models.deepseek_v3 import DeepseekV3Shape, canonical_shapes, megatron, mtp_shapes


@dataclass(frozen=True)
class MegatronForm:
    """placement: with dp equal to ep, so that every rank has a file of its own.
    mla_mm_split: linear_qb and linear_kvb each in two weights, without and with the rotary part (keys and values).
    moe_grouped_gemm: all experts of a layer in weight1 and weight2; otherwise local_experts.N.
    mtp_layers: layers for multi-token prediction that are kept, 0 or 1.
    """

    placement: TrainPlacement
    mla_mm_split: bool = False
    moe_grouped_gemm: bool = True
    mtp_layers: int = 0

    def __post_init__(self) -> None:
        if self.placement.dp != self.placement.ep:
            raise ValueError("the placement of files has dp equal to ep")
        if self.placement.moe_tp_extend_ep and not self.moe_grouped_gemm:
            raise ValueError(
                "moe-tp-extend-ep needs moe-grouped-gemm: without it MindSpeed-LLM's converter cuts the joined gate "
                "and up projection of an expert in the middle, and no model can train from such shards"
            )
        if self.mtp_layers > 1:
            raise ValueError(f"at most one layer for multi-token prediction can be kept, not {self.mtp_layers}")

    def as_arguments(self) -> dict[str, Any]:
        """The form in plain values, for a manifest."""
        values = asdict(self)
        values["placement"]["num_layer_list"] = list(self.placement.num_layer_list)
        return values

    @classmethod
    def from_arguments(cls, values: dict[str, Any]) -> "MegatronForm":
        """The inverse of `as_arguments`."""
        placement = values["placement"] | {"num_layer_list": tuple(values["placement"]["num_layer_list"])}
        return cls(**(values | {"placement": TrainPlacement(**placement)}))


def all_shapes(shape: DeepseekV3Shape, mtp_layers: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every HuggingFace tensor that has a place in the form."""
    return canonical_shapes(shape) | (mtp_shapes(shape, shape.layers) if mtp_layers else {})


def mtp_prefix(shape: DeepseekV3Shape) -> str:
    """How the names of the first layer for multi-token prediction begin."""
    return f"model.layers.{shape.layers}."


def mtp_aliases(shape: DeepseekV3Shape) -> dict[str, str]:
    """Embedding and head of multi-token prediction are those of the model; HuggingFace files store them again."""
    prefix = mtp_prefix(shape)
    return {
        f"{prefix}embed_tokens.weight": "model.embed_tokens.weight",
        f"{prefix}shared_head.head.weight": "lm_head.weight",
    }


def rank_pieces(shape: DeepseekV3Shape, form: MegatronForm, rank: int) -> list[Piece]:
    """The pieces of one rank. Raises ValueError when the layout does not fit the model."""
    pieces = megatron(shape, form.placement, rank)
    if form.mtp_layers and form.placement.pp_rank(rank) == form.placement.pp - 1:
        pieces = _with_mtp(shape, form.placement, rank, pieces)
    if form.mla_mm_split:
        pieces = [part for piece in pieces for part in _split_heads(shape, piece)]
    if not form.moe_grouped_gemm:
        pieces = [_single_expert(piece) for piece in pieces]
    return pieces


def _with_mtp(shape: DeepseekV3Shape, placement: TrainPlacement, rank: int, pieces: list[Piece]) -> list[Piece]:
    """The last stage with a layer more, kept in mtp_layers.0; the final norm leaves the decoder."""
    chunk = placement.chunk_prefix(placement.virtual_stages - 1)
    local, prefix, tp, tp_rank = f"{chunk}mtp_layers.0.", mtp_prefix(shape), placement.tp, placement.tp_rank(rank)
    *first, last = placement.num_layer_list
    deeper = replace(placement, num_layer_list=(*first, last + 1))
    for piece in megatron(replace(shape, layers=shape.layers + 1), deeper, rank):
        if piece.canonical.startswith(prefix):
            inner = piece.local.removeprefix(f"{chunk}decoder.layers.{last}.")
            pieces.append(replace(piece, local=f"{local}transformer_layer.{inner}"))
    norms = {"enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "final_layernorm"}
    for name, own in norms.items():
        pieces.append(Piece(f"{prefix}{name}.weight", whole_box((shape.hidden,)), f"{local}{own}.weight"))
    rows = share(shape.hidden, tp, tp_rank, f"{prefix}eh_proj.weight")
    pieces.append(Piece(f"{prefix}eh_proj.weight", (rows, (0, 2 * shape.hidden)), f"{local}eh_proj.weight"))
    if placement.pp > 1:
        rows = share(shape.vocab, tp, tp_rank, "vocabulary rows over tensor parallel ranks")
        name = f"{local}embedding.word_embeddings.weight"
        pieces += vocabulary_pieces(f"{prefix}embed_tokens.weight", name, shape.vocab, shape.hidden, rows)
    norm = f"{chunk}decoder.final_layernorm.weight"
    return [replace(p, local=f"{chunk}final_layernorm.weight") if p.local == norm else p for p in pieces]


def _split_heads(shape: DeepseekV3Shape, piece: Piece) -> Iterator[Piece]:
    """The rows of linear_qb and linear_kvb, head by head, in the weights of MindSpeed-LLM's mla-mm-split."""
    splits = {
        "linear_qb.weight": (("linear_qk_nope.weight", shape.qk_nope), ("linear_qk_rope.weight", shape.qk_rope)),
        "linear_kvb.weight": (("linear_kv_nope.weight", shape.qk_nope), ("linear_v.weight", shape.v_head)),
    }
    name = next((name for name in splits if piece.local.endswith(f"self_attention.{name}")), None)
    if name is None:
        yield piece
        return
    local, (first, last) = piece.local.removesuffix(name), piece.box[0]
    width = sum(rows for _, rows in splits[name])
    if first % width or last % width:
        raise ValueError(f"{piece.local}: mla-mm-split needs whole heads on every tensor parallel rank")
    for head in range((last - first) // width):
        start = first + head * width
        for own, rows in splits[name]:
            box = ((start, start + rows), piece.box[1])
            yield Piece(piece.canonical, box, local + own, LocalView(index=((head * rows, (head + 1) * rows),)))
            start += rows


def _single_expert(piece: Piece) -> Piece:
    """An expert's part of weight1 or weight2 as the weight of its own module, which is not transposed."""
    module, _, weight = piece.local.rpartition(".")
    if not module.endswith(".experts"):
        return piece
    slot, *rest = piece.view.index
    expert = f"{module}.local_experts.{slot}."
    if weight == "weight2":
        return replace(piece, local=f"{expert}linear_fc2.weight", view=LocalView())
    return replace(piece, local=f"{expert}linear_fc1.weight", view=LocalView(index=(rest[1],)))


def local_shapes(pieces: Iterable[Piece]) -> dict[str, tuple[int, ...]]:
    """The shape of every local tensor, from the pieces that fill it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        if piece.view.shape is not None:
            count, rows, columns = piece.view.shape
            grouped = (rows, count * columns) if piece.local.endswith("weight1") else (count * rows, columns)
            shapes[piece.local] = grouped
            continue
        leading = piece.view.index[0] if piece.view.index else (0, piece.extents[0])
        stop = leading + 1 if isinstance(leading, int) else leading[1]
        known = shapes.get(piece.local, (0,))
        shapes[piece.local] = (max(known[0], stop), *piece.extents[1:])
    return shapes
