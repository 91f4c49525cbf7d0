"""The Qwen2.5 layout tables: HuggingFace files, Megatron (dense, with bias on q, k and v), vLLM-Ascend 0.9.1 rollout.

Canonical names and shapes are those of transformers' Qwen2ForCausalLM; every linear weight is [out, in]. Megatron's
names are those of its transformer_engine spec, where a norm belongs to the projection after it: verl knows no others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from post_training.layouts.layout import (
    LocalView,
    Piece,
    RolloutPlacement,
    Table,
    TrainPlacement,
    cut_piece,
    gate_up_pieces,
    gated_shapes,
    megatron_vocabulary_pieces,
    rollout_vocabulary_pieces,
    share,
    whole_box,
)
from post_training.models.families import ModelFamily
from post_training.models.sizes import ModelSizes, grouped_attention_sizes

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Qwen2Shape:
    """The sizes that decide every tensor shape of Qwen2.5. tied: the output layer is the embedding."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    @classmethod
    def from_config(cls, config: Any) -> "Qwen2Shape":
        """Read a transformers Qwen2Config (or the mapping of its config.json)."""
        values = config if isinstance(config, Mapping) else config.to_dict()
        heads = values["num_attention_heads"]
        return cls(
            hidden=values["hidden_size"],
            intermediate=values["intermediate_size"],
            layers=values["num_hidden_layers"],
            heads=heads,
            kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            vocab=values["vocab_size"],
            tied=values.get("tie_word_embeddings", False),
        )

    def width(self, projection: str) -> int:
        """Output features of q_proj, k_proj or v_proj."""
        return (self.heads if projection == "q_proj" else self.kv_heads) * self.head_dim

    @property
    def output(self) -> str:
        """The canonical tensor that the output layer multiplies with."""
        return EMBEDDING if self.tied else OUTPUT


def table(shape: Qwen2Shape) -> Table:
    """All layouts of a Qwen2.5 of these sizes. Files of a tied model may repeat the embedding as output layer."""
    return Table(
        layers=shape.layers,
        shapes=canonical_shapes(shape),
        megatron=partial(megatron, shape),
        vllm_ascend=partial(vllm_ascend, shape),
        ignored_in_files=(OUTPUT,) if shape.tied else (),
    )


def canonical_shapes(shape: Qwen2Shape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every HuggingFace tensor."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name in PROJECTIONS:
            shapes[f"{prefix}self_attn.{name}.weight"] = (shape.width(name), shape.hidden)
            shapes[f"{prefix}self_attn.{name}.bias"] = (shape.width(name),)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (shape.hidden, shape.width("q_proj"))
        shapes[f"{prefix}input_layernorm.weight"] = (shape.hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (shape.hidden,)
        shapes |= gated_shapes(f"{prefix}mlp.", shape.hidden, shape.intermediate)
    shapes["model.norm.weight"] = (shape.hidden,)
    return shapes if shape.tied else shapes | {OUTPUT: (shape.vocab, shape.hidden)}


def megatron(shape: Qwen2Shape, placement: TrainPlacement, rank: int) -> list[Piece]:
    """The pieces of one training rank.

    With tied embeddings the last stage keeps a copy of the embedding, unless the first model chunk is also the last.
    Raises ValueError when the layer list does not add up or a width does not divide over the ranks.
    """
    if sum(placement.num_layer_list) != shape.layers:
        raise ValueError(f"num_layer_list {placement.num_layer_list} does not add up to {shape.layers} layers")
    pieces: list[Piece] = []
    for slot in placement.layers(rank):
        local = f"{placement.chunk_prefix(slot.chunk)}decoder.layers.{slot.position}."
        pieces += _megatron_layer(shape, slot.layer, local, placement.tp, placement.tp_rank(rank))
    vocabulary = partial(
        megatron_vocabulary_pieces, valid=shape.vocab, hidden=shape.hidden, placement=placement, rank=rank
    )
    if placement.pp_rank(rank) == 0:
        pieces += vocabulary(EMBEDDING, f"{placement.chunk_prefix(0)}embedding.word_embeddings.weight")
    if placement.pp_rank(rank) == placement.pp - 1:
        last = placement.chunk_prefix(placement.virtual_stages - 1)
        pieces.append(Piece("model.norm.weight", whole_box((shape.hidden,)), f"{last}decoder.final_layernorm.weight"))
        if not shape.tied or placement.pp * placement.virtual_stages > 1:
            pieces += vocabulary(shape.output, f"{last}output_layer.weight")
    return pieces


def _megatron_layer(shape: Qwen2Shape, layer: int, local: str, tp: int, tp_rank: int) -> list[Piece]:
    canonical = f"model.layers.{layer}."
    hidden = whole_box((shape.hidden,))
    qkv, fc1 = f"{local}self_attention.linear_qkv.", f"{local}mlp.linear_fc1."
    down, width = f"{canonical}mlp.down_proj.weight", shape.intermediate
    return [
        Piece(f"{canonical}input_layernorm.weight", hidden, f"{qkv}layer_norm_weight"),
        Piece(f"{canonical}post_attention_layernorm.weight", hidden, f"{fc1}layer_norm_weight"),
        *_grouped_qkv(shape, f"{canonical}self_attn.", qkv, tp, tp_rank),
        _output_projection(shape, canonical, f"{local}self_attention.linear_proj.weight", tp, tp_rank),
        *gate_up_pieces(f"{canonical}mlp.", f"{fc1}weight", shape.hidden, width, tp, tp_rank),
        cut_piece(down, (shape.hidden, width), f"{local}mlp.linear_fc2.weight", 1, tp, tp_rank),
    ]


def _output_projection(shape: Qwen2Shape, canonical: str, local: str, tp: int, tp_rank: int) -> Piece:
    dims = (shape.hidden, shape.width("q_proj"))
    return cut_piece(f"{canonical}self_attn.o_proj.weight", dims, local, 1, tp, tp_rank)


def _grouped_qkv(shape: Qwen2Shape, canonical: str, local: str, tp: int, tp_rank: int) -> list[Piece]:
    """Megatron's order of rows: for each query group its query heads, its key head, its value head."""
    first, last = share(shape.kv_heads, tp, tp_rank, f"{canonical}k_proj: query groups over tensor parallel ranks")
    pieces, row = [], 0
    for group in range(first, last):
        for name in PROJECTIONS:
            rows = shape.width(name) // shape.kv_heads
            pieces += _rows_with_bias(shape, canonical + name, local, (group * rows, (group + 1) * rows), row)
            row += rows
    return pieces


def _rows_with_bias(shape: Qwen2Shape, canonical: str, local: str, rows: tuple[int, int], at: int) -> list[Piece]:
    """These rows of a projection and of its bias, from row `at` on of the fused local weight and bias."""
    view = LocalView(index=((at, at + rows[1] - rows[0]),))
    return [
        Piece(f"{canonical}.weight", (rows, (0, shape.hidden)), f"{local}weight", view),
        Piece(f"{canonical}.bias", (rows,), f"{local}bias", view),
    ]


def vllm_ascend(shape: Qwen2Shape, placement: RolloutPlacement, rank: int) -> list[Piece]:
    """The pieces of one rollout rank. A tied output layer is the embedding itself and has no tensor of its own.

    Raises ValueError when a width does not divide over the ranks.
    """
    vocabulary = partial(
        rollout_vocabulary_pieces, valid=shape.vocab, hidden=shape.hidden, placement=placement, rank=rank
    )
    tp, tp_rank = placement.tp, placement.tp_rank(rank)
    pieces = vocabulary(EMBEDDING, parts=tp)
    for layer in range(shape.layers):
        pieces += _rollout_layer(shape, f"model.layers.{layer}.", tp, tp_rank)
    pieces.append(Piece("model.norm.weight", whole_box((shape.hidden,)), "model.norm.weight"))
    return pieces if shape.tied else pieces + vocabulary(OUTPUT, parts=tp)


def _rollout_layer(shape: Qwen2Shape, prefix: str, tp: int, tp_rank: int) -> list[Piece]:
    norms = (f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight")
    down, width = f"{prefix}mlp.down_proj.weight", shape.intermediate
    return [
        *(Piece(name, whole_box((shape.hidden,)), name) for name in norms),
        *_stacked_qkv(shape, f"{prefix}self_attn.", tp, tp_rank),
        _output_projection(shape, prefix, f"{prefix}self_attn.o_proj.weight", tp, tp_rank),
        *gate_up_pieces(f"{prefix}mlp.", f"{prefix}mlp.gate_up_proj.weight", shape.hidden, width, tp, tp_rank),
        cut_piece(down, (shape.hidden, width), down, 1, tp, tp_rank),
    ]


def _stacked_qkv(shape: Qwen2Shape, prefix: str, tp: int, tp_rank: int) -> list[Piece]:
    """vLLM's order of rows: all query heads of the rank, its key heads, its value heads.

    With more ranks than key heads, consecutive ranks share one.
    """
    copies = max(tp // shape.kv_heads, 1)
    if tp > shape.kv_heads and tp % shape.kv_heads:
        raise ValueError(f"{prefix}k_proj: {shape.kv_heads} key heads cannot be shared by {tp} ranks")
    pieces, row = [], 0
    for name in PROJECTIONS:
        heads, parts = (shape.heads, tp) if name == "q_proj" else (shape.kv_heads, tp // copies)
        index = tp_rank if name == "q_proj" else tp_rank // copies
        first, last = share(heads, parts, index, f"{prefix}{name}: heads over tensor parallel ranks")
        rows = (first * shape.head_dim, last * shape.head_dim)
        pieces += _rows_with_bias(shape, prefix + name, f"{prefix}qkv_proj.", rows, row)
        row += rows[1] - rows[0]
    return pieces


def sizes(config: Mapping[str, Any]) -> ModelSizes:
    """What plans and counts need of a Qwen2.5. Raises KeyError for a config.json without a size."""
    return grouped_attention_sizes(config, dense_layers=config["num_hidden_layers"])


FAMILY = ModelFamily(
    name="Qwen2.5",
    architecture="Qwen2ForCausalLM",
    model_types=("qwen2", "llama"),
    table=lambda config: table(Qwen2Shape.from_config(config)),
    sizes=sizes,
)
