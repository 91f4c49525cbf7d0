"""Layouts of decoders whose query heads share key and value heads in groups (GQA), dense or with experts in each layer.

HF names and shapes are those of transformers; every linear weight is [out, in]. Megatron's names are those of its
transformer_engine spec, where a norm belongs to the projection after it: verl supports no other spec.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Self

from post_training.layouts.experts import Experts, megatron_experts, rollout_experts
from post_training.layouts.layout import (
    LocalView,
    RolloutPlacement,
    Shard,
    Table,
    TrainPlacement,
    cut_shard,
    gate_up_shards,
    gated_shapes,
    megatron_vocabulary_shards,
    rollout_vocabulary_shards,
    share,
    whole_slice,
)

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
HEAD_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class GroupedQueryShape:
    """The sizes that determine every tensor shape.

    Attributes:
        tied: whether the output layer is the embedding.
        bias: whether q, k and v have a bias.
        head_norms: whether the heads of query and key are normed.
        experts: number of experts of every layer, each `expert_width` wide; 0 for none.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    bias: bool = False
    head_norms: bool = False
    experts: int = 0
    expert_width: int = 0

    @classmethod
    def from_config(cls, config: Any, **more: Any) -> Self:
        """Read a transformers config (or the mapping of its config.json); `more` are the family's own fields."""
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
            **more,
        )

    def width(self, projection: str) -> int:
        """Output features of q_proj, k_proj or v_proj."""
        return (self.heads if projection == "q_proj" else self.kv_heads) * self.head_dim

    @property
    def output(self) -> str:
        """The HF tensor that the output layer multiplies with."""
        return EMBEDDING if self.tied else OUTPUT


def table(shape: GroupedQueryShape) -> Table:
    """Return all layouts of a model of these sizes. Files of a tied model may repeat the embedding as output layer."""
    return Table(
        layers=shape.layers,
        shapes=hf_shapes(shape),
        megatron=partial(megatron, shape),
        vllm_ascend=partial(vllm_ascend, shape),
        ignored_in_files=(OUTPUT,) if shape.tied else (),
    )


def hf_shapes(shape: GroupedQueryShape) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every HuggingFace tensor."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name in PROJECTIONS:
            shapes[f"{prefix}self_attn.{name}.weight"] = (shape.width(name), shape.hidden)
            if shape.bias:
                shapes[f"{prefix}self_attn.{name}.bias"] = (shape.width(name),)
        if shape.head_norms:
            shapes |= {f"{prefix}self_attn.{name}.weight": (shape.head_dim,) for name in HEAD_NORMS}
        shapes[f"{prefix}self_attn.o_proj.weight"] = (shape.hidden, shape.width("q_proj"))
        shapes[f"{prefix}input_layernorm.weight"] = (shape.hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (shape.hidden,)
        if not shape.experts:
            shapes |= gated_shapes(f"{prefix}mlp.", shape.hidden, shape.intermediate)
            continue
        shapes[f"{prefix}mlp.gate.weight"] = (shape.experts, shape.hidden)
        for expert in range(shape.experts):
            shapes |= gated_shapes(f"{prefix}mlp.experts.{expert}.", shape.hidden, shape.expert_width)
    shapes["model.norm.weight"] = (shape.hidden,)
    return shapes if shape.tied else shapes | {OUTPUT: (shape.vocab, shape.hidden)}


def megatron(shape: GroupedQueryShape, placement: TrainPlacement, rank: int) -> list[Shard]:
    """Return the shards of one training rank.

    With tied embeddings the last stage keeps a copy of the embedding, unless the first model chunk is also the last.
    Raises ValueError when the layer list does not add up or a width does not divide over the ranks.
    """
    if sum(placement.num_layer_list) != shape.layers:
        raise ValueError(f"num_layer_list {placement.num_layer_list} does not add up to {shape.layers} layers")
    shards: list[Shard] = []
    for slot in placement.layers(rank):
        local = f"{placement.chunk_prefix(slot.chunk)}decoder.layers.{slot.position}."
        shards += _megatron_attention(shape, slot.layer, local, placement.tp, placement.tp_rank(rank))
        shards += _megatron_feed_forward(shape, placement, rank, slot.layer, local)
    vocabulary = partial(
        megatron_vocabulary_shards, valid=shape.vocab, hidden=shape.hidden, placement=placement, rank=rank
    )
    if placement.pp_rank(rank) == 0:
        shards += vocabulary(EMBEDDING, f"{placement.chunk_prefix(0)}embedding.word_embeddings.weight")
    if placement.pp_rank(rank) == placement.pp - 1:
        last = placement.chunk_prefix(placement.virtual_stages - 1)
        shards.append(Shard("model.norm.weight", whole_slice((shape.hidden,)), f"{last}decoder.final_layernorm.weight"))
        if not shape.tied or placement.pp * placement.virtual_stages > 1:
            shards += vocabulary(shape.output, f"{last}output_layer.weight")
    return shards


def _megatron_attention(shape: GroupedQueryShape, layer: int, local: str, tp: int, tp_rank: int) -> list[Shard]:
    hf_name = f"model.layers.{layer}."
    qkv = f"{local}self_attention.linear_qkv."
    shards = [
        Shard(f"{hf_name}input_layernorm.weight", whole_slice((shape.hidden,)), f"{qkv}layer_norm_weight"),
        *_grouped_qkv(shape, f"{hf_name}self_attn.", qkv, tp, tp_rank),
        _output_projection(shape, hf_name, f"{local}self_attention.linear_proj.weight", tp, tp_rank),
    ]
    if shape.head_norms:
        names = zip(HEAD_NORMS, ("q_layernorm", "k_layernorm"), strict=True)
        shards += [_head_norm(shape, hf_name, name, f"{local}self_attention.{own}.weight") for name, own in names]
    return shards


def _head_norm(shape: GroupedQueryShape, hf_name: str, name: str, local: str) -> Shard:
    return Shard(f"{hf_name}self_attn.{name}.weight", whole_slice((shape.head_dim,)), local)


def _megatron_feed_forward(
    shape: GroupedQueryShape, placement: TrainPlacement, rank: int, layer: int, local: str
) -> list[Shard]:
    """Return norm and feed-forward: the norm before experts is a module, that of a dense network part of linear_fc1."""
    hf_name, hidden = f"model.layers.{layer}.", whole_slice((shape.hidden,))
    norm = f"{hf_name}post_attention_layernorm.weight"
    if shape.experts:
        gate = whole_slice((shape.experts, shape.hidden))
        return [
            Shard(norm, hidden, f"{local}pre_mlp_layernorm.weight"),
            Shard(f"{hf_name}mlp.gate.weight", gate, f"{local}mlp.router.weight"),
            *megatron_experts(_experts(shape), placement, rank, layer, f"{local}mlp.experts."),
        ]
    fc1, down, width = f"{local}mlp.linear_fc1.", f"{hf_name}mlp.down_proj.weight", shape.intermediate
    tp, tp_rank = placement.tp, placement.tp_rank(rank)
    return [
        Shard(norm, hidden, f"{fc1}layer_norm_weight"),
        *gate_up_shards(f"{hf_name}mlp.", f"{fc1}weight", shape.hidden, width, tp, tp_rank),
        cut_shard(down, (shape.hidden, width), f"{local}mlp.linear_fc2.weight", 1, tp, tp_rank),
    ]


def _experts(shape: GroupedQueryShape) -> Experts:
    return Experts(shape.experts, shape.hidden, shape.expert_width)


def _output_projection(shape: GroupedQueryShape, hf_name: str, local: str, tp: int, tp_rank: int) -> Shard:
    dims = (shape.hidden, shape.width("q_proj"))
    return cut_shard(f"{hf_name}self_attn.o_proj.weight", dims, local, 1, tp, tp_rank)


def _grouped_qkv(shape: GroupedQueryShape, hf_name: str, local: str, tp: int, tp_rank: int) -> list[Shard]:
    """Return q, k and v in Megatron's order of rows: per query group its query heads, its key head, its value head.

    Four query heads of one row share two key heads, so that each group has the rows q q k v:

    >>> shape = GroupedQueryShape(1, 1, 1, heads=4, kv_heads=2, head_dim=1, vocab=1, tied=True)
    >>> [(shard.hf_name[0], shard.bounds[0], shard.view.index[0]) for shard in _grouped_qkv(shape, "", "", 1, 0)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('q', (0, 2), (0, 2)), ('k', (0, 1), (2, 3)), ('v', (0, 1), (3, 4)),
     ('q', (2, 4), (4, 6)), ('k', (1, 2), (6, 7)), ('v', (1, 2), (7, 8))]
    """
    first, last = share(shape.kv_heads, tp, tp_rank, f"{hf_name}k_proj: query groups over tensor parallel ranks")
    shards, row = [], 0
    for group in range(first, last):
        for name in PROJECTIONS:
            rows = shape.width(name) // shape.kv_heads
            shards += _fused_rows(shape, hf_name + name, local, (group * rows, (group + 1) * rows), row)
            row += rows
    return shards


def _fused_rows(shape: GroupedQueryShape, hf_name: str, local: str, rows: tuple[int, int], at: int) -> list[Shard]:
    """Place these rows of a projection and of its bias from row `at` on in the fused local weight and bias."""
    view = LocalView(index=((at, at + rows[1] - rows[0]),))
    weight = Shard(f"{hf_name}.weight", (rows, (0, shape.hidden)), f"{local}weight", view)
    return [weight, Shard(f"{hf_name}.bias", (rows,), f"{local}bias", view)] if shape.bias else [weight]


def vllm_ascend(shape: GroupedQueryShape, placement: RolloutPlacement, rank: int) -> list[Shard]:
    """Return the shards of one rollout rank. A tied output layer is the embedding itself, without a tensor of its own.

    Raises ValueError when a width does not divide over the ranks.
    """
    vocabulary = partial(
        rollout_vocabulary_shards, valid=shape.vocab, hidden=shape.hidden, placement=placement, rank=rank
    )
    tp, tp_rank = placement.tp, placement.tp_rank(rank)
    shards = vocabulary(EMBEDDING, parts=tp)
    for layer in range(shape.layers):
        shards += _rollout_layer(shape, f"model.layers.{layer}.", tp, tp_rank)
        shards += rollout_experts(_experts(shape), placement, rank, layer) if shape.experts else []
    shards.append(Shard("model.norm.weight", whole_slice((shape.hidden,)), "model.norm.weight"))
    return shards if shape.tied else shards + vocabulary(OUTPUT, parts=tp)


@lru_cache(maxsize=4096)
def _rollout_layer(shape: GroupedQueryShape, prefix: str, tp: int, tp_rank: int) -> list[Shard]:
    """Return all shards of a layer except its routed experts."""
    norms = (f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight")
    shards = [
        *(Shard(name, whole_slice((shape.hidden,)), name) for name in norms),
        *_stacked_qkv(shape, f"{prefix}self_attn.", tp, tp_rank),
        _output_projection(shape, prefix, f"{prefix}self_attn.o_proj.weight", tp, tp_rank),
    ]
    if shape.head_norms:
        shards += [_head_norm(shape, prefix, name, f"{prefix}self_attn.{name}.weight") for name in HEAD_NORMS]
    if shape.experts:
        gate = f"{prefix}mlp.gate.weight"
        return [*shards, Shard(gate, whole_slice((shape.experts, shape.hidden)), gate)]
    down, width = f"{prefix}mlp.down_proj.weight", shape.intermediate
    return [
        *shards,
        *gate_up_shards(f"{prefix}mlp.", f"{prefix}mlp.gate_up_proj.weight", shape.hidden, width, tp, tp_rank),
        cut_shard(down, (shape.hidden, width), down, 1, tp, tp_rank),
    ]


def _stacked_qkv(shape: GroupedQueryShape, prefix: str, tp: int, tp_rank: int) -> list[Shard]:
    """Return q, k and v in vLLM's order of rows: all query heads of the rank, its key heads, its value heads.

    With more ranks than key heads, consecutive ranks share one: of four ranks, the third has the third query head, and
    the second key head, which the fourth has too.

    >>> shape = GroupedQueryShape(1, 1, 1, heads=4, kv_heads=2, head_dim=1, vocab=1, tied=True)
    >>> [(shard.hf_name[0], shard.bounds[0], shard.view.index[0]) for shard in _stacked_qkv(shape, "", 4, 2)]
    [('q', (2, 3), (0, 1)), ('k', (1, 2), (1, 2)), ('v', (1, 2), (2, 3))]
    """
    copies = max(tp // shape.kv_heads, 1)
    if tp > shape.kv_heads and tp % shape.kv_heads:
        raise ValueError(f"{prefix}k_proj: {shape.kv_heads} key heads cannot be shared by {tp} ranks")
    shards, row = [], 0
    for name in PROJECTIONS:
        heads, parts = (shape.heads, tp) if name == "q_proj" else (shape.kv_heads, tp // copies)
        index = tp_rank if name == "q_proj" else tp_rank // copies
        first, last = share(heads, parts, index, f"{prefix}{name}: heads over tensor parallel ranks")
        rows = (first * shape.head_dim, last * shape.head_dim)
        shards += _fused_rows(shape, prefix + name, f"{prefix}qkv_proj.", rows, row)
        row += rows[1] - rows[0]
    return shards
