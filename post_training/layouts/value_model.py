"""The layout of a critic: that of its model, with one output per token in place of the vocabulary.

HF names are those of transformers' classes for token classification, which a critic on FSDP has too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from post_training.layouts.layout import RolloutPlacement, Shard, Table, TrainPlacement, whole_slice

HEAD_WEIGHT, HEAD_BIAS = "score.weight", "score.bias"
_OUTPUT, _LOCAL, _NORM = "lm_head.weight", "output_layer.", "model.norm.weight"


def value_table(table: Table) -> Table:
    """Return a critic's layouts for the model of `table`. Every tensor parallel rank of the last stage has the head."""
    (hidden,) = table.shapes[_NORM]
    head = {HEAD_WEIGHT: (1, hidden), HEAD_BIAS: (1,)}

    def megatron(placement: TrainPlacement, rank: int) -> list[Shard]:
        shards = without_head(table.megatron(placement, rank))
        if placement.pp_rank(rank) == placement.pp - 1:
            local = placement.chunk_prefix(placement.virtual_stages - 1) + _LOCAL
            shards += [Shard(name, whole_slice(shape), local + name.rpartition(".")[2]) for name, shape in head.items()]
        return shards

    shapes = {name: shape for name, shape in table.shapes.items() if name != _OUTPUT} | head
    return replace(table, shapes=shapes, megatron=megatron, vllm_ascend=_not_served)


def without_head(shards: list[Shard]) -> list[Shard]:
    """Return `shards` without those of the output layer, which the last stage applies to its hidden states."""
    return [shard for shard in shards if not shard.local.rpartition(_LOCAL)[1]]


def _not_served(placement: RolloutPlacement, rank: int) -> NoReturn:
    raise ValueError("a critic is trained but never served, so it has no layout in the rollout")
