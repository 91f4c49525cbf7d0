"""Maps the layouts, which have the names of core_r0.8.0 and MindSpeed-LLM, to Megatron-core 0.16's parameters.

A model's new names depend on its layers: TransformerEngine's (and MindSpeed's) keep a norm in the linear layer behind
it, Megatron-core's own do not; experts are one module each, or one weight each in a grouped module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from post_training.layouts.layout import WHOLE, LocalView, Shard, TrainPlacement, share
from post_training.layouts.placements import PlacementError, train_placement

# Suffixes of the layouts' names, with the suffixes that the same weight may have instead.
_OTHER_NAMES = (
    (".self_attention.linear_qkv.layer_norm_weight", (".input_layernorm.weight",)),
    (".mlp.linear_fc1.layer_norm_weight", (".pre_mlp_layernorm.weight",)),
    (".pre_mlp_layernorm.weight", (".mlp.linear_fc1.layer_norm_weight",)),
    (".self_attention.q_layernorm.weight", (".self_attention.linear_q_up_proj.layer_norm_weight",)),
    (
        ".self_attention.k_layernorm.weight",
        (".self_attention.kv_layernorm.weight", ".self_attention.linear_kv_up_proj.layer_norm_weight"),
    ),
    (".self_attention.linear_qb.weight", (".self_attention.linear_q_up_proj.weight",)),
    (".self_attention.linear_kvb.weight", (".self_attention.linear_kv_up_proj.weight",)),
)
# The first projections of MLA, which MindSpeed-LLM keeps in one weight.
_FIRST_PROJECTION = ".self_attention.linear_qkv.weight"
_FIRST_PROJECTIONS = {
    ".q_a_proj.weight": ".self_attention.linear_q_down_proj.weight",
    ".kv_a_proj_with_mqa.weight": ".self_attention.linear_kv_down_proj.weight",
}
_GROUPED = re.compile(r"(?P<prefix>.*\.mlp\.experts\.)weight(?P<linear>[12])$")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def megatron_placement(transformer_config: Any, tensors: Mapping[str, torch.Tensor]) -> TrainPlacement:
    """Return the placement of this process group.

    Raises:
        PlacementError: the layouts do not describe the order of ranks or the cut of experts.
    """
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_world_size()
    cut = parallel_state.get_expert_tensor_parallel_world_size()
    whole = bool(transformer_config.num_moe_experts) and cut != tp
    if whole and (cut != 1 or parallel_state.get_expert_model_parallel_world_size() % tp):
        raise PlacementError(
            f"expert_tensor_parallel_size={cut} is invalid: with tensor_model_parallel_size={tp} alltoallv needs "
            f"experts split by {tp}, or whole ones over a multiple of {tp} ranks. Set it to {tp}."
        )
    placement = train_placement(transformer_config, whole_experts=whole)
    rows = next((len(tensor) for name, tensor in tensors.items() if name.endswith(_VOCABULARY)), None)
    return replace(placement, vocab_padded=rows * tp if rows else None)


def fitted(
    shards: Iterable[Shard], tensors: Mapping[str, torch.Tensor], placement: TrainPlacement, rank: int
) -> list[Shard]:
    """Return the shards under this model's parameter names, with the rows and views that its parameters have."""
    return [_fitted(shard, tensors, placement, rank) for shard in shards]


def _fitted(shard: Shard, tensors: Mapping[str, torch.Tensor], placement: TrainPlacement, rank: int) -> Shard:
    if shard.local in tensors:
        return shard
    grouped = _GROUPED.match(shard.local)
    if grouped:
        return _single_expert(shard, grouped["prefix"], grouped["linear"], tensors)
    for ending, own in _FIRST_PROJECTIONS.items():
        if shard.local.endswith(_FIRST_PROJECTION) and shard.hf_name.endswith(ending):
            local = shard.local.removesuffix(_FIRST_PROJECTION) + own
            return _rows_held(replace(shard, local=local, view=WHOLE), tensors, placement, rank)
    for ending, others in _OTHER_NAMES:
        if shard.local.endswith(ending):
            names = [shard.local.removesuffix(ending) + other for other in others]
            return replace(shard, local=next((name for name in names if name in tensors), shard.local))
    return shard


def _rows_held(shard: Shard, tensors: Mapping[str, torch.Tensor], placement: TrainPlacement, rank: int) -> Shard:
    """Cut a shard to this rank's rows if its parameter is cut.

    Megatron-core's own linear layers cut these weights over tensor parallel ranks, TransformerEngine's do not.
    """
    rows = shard.extents[0]
    if shard.local not in tensors or len(tensors[shard.local]) == rows:
        return shard
    held = share(rows, placement.tp, placement.tp_rank(rank), shard.hf_name)
    return replace(shard, bounds=(held, shard.bounds[1]))


def _single_expert(shard: Shard, prefix: str, linear: str, tensors: Mapping[str, torch.Tensor]) -> Shard:
    """Map a grouped expert's shard to the expert's own weight, [out, in] as in the files, gate rows above up rows."""
    slot, *within = shard.view.index
    own = f"{prefix}local_experts.{slot}.linear_fc{linear}.weight"
    local = own if own in tensors else f"{prefix}linear_fc{linear}.weight{slot}"
    view = LocalView(index=(within[-1],)) if within else WHOLE
    return replace(shard, local=local, view=view)
