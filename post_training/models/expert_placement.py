"""Check whether this project's Megatron modules implement a placement of a decoder with routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertPlacement:
    """Sizes of a decoder with experts and of the parallel groups that train it.

    Attributes:
        num_layer_list: layers of each stage; empty for equal shares.
        dense_layers: number of leading layers without experts.
        groups: number of groups of experts.
        chosen_groups, chosen: groups and experts that are chosen for a token.
        whole_experts: whether whole experts are spread over TP x EP (moe_tp_extend_ep).
    """

    layers: int
    stages: int
    virtual_stages: int | None
    num_layer_list: tuple[int, ...]
    dense_layers: int
    experts: int
    groups: int
    chosen_groups: int
    chosen: int
    tensor_parallel: int
    expert_parallel: int
    context_parallel: int
    sequence_parallel: bool
    whole_experts: bool

    @property
    def layers_on_first_stage(self) -> int:
        return self.num_layer_list[0] if self.num_layer_list else self.layers // self.stages


def expert_placement_findings(placement: ExpertPlacement) -> Iterator[str]:
    """Yield a sentence for each combination that the modules cannot honour."""
    yield from _pipeline_findings(placement)
    if placement.experts:
        yield from _expert_findings(placement)
        yield from _router_findings(placement)
    if placement.context_parallel > 1:
        yield "models with experts on megatron-core 0.8.0 do not support context_parallel_size > 1"


def _pipeline_findings(placement: ExpertPlacement) -> Iterator[str]:
    listed, stages = list(placement.num_layer_list), placement.stages
    if placement.virtual_stages is not None:
        yield (
            f"virtual_pipeline_model_parallel_size={placement.virtual_stages} is invalid: models with experts on "
            "megatron-core 0.8.0 do not support virtual pipeline stages. Set it to null"
        )
    if not listed:
        if placement.layers % stages:
            yield f"{placement.layers} layers do not divide over {stages} stages. Set num_layer_list"
        return
    if len(listed) != stages:
        yield f"num_layer_list {listed} must name {stages} pipeline stages"
    if sum(listed) != placement.layers or min(listed) < 1:
        yield f"num_layer_list {listed} must be positive and add up to {placement.layers}"


def _expert_findings(placement: ExpertPlacement) -> Iterator[str]:
    if not placement.whole_experts:
        yield "moe_tp_extend_ep=False is not supported: experts are sharded over TP x EP"
    ranks = placement.tensor_parallel * placement.expert_parallel
    if placement.experts % ranks:
        yield f"{placement.experts} experts do not divide over TP x EP = {ranks} ranks"
    if placement.tensor_parallel > 1 and not placement.sequence_parallel:
        # Every tensor-parallel rank would dispatch the same tokens and expert gradients would count them TP times.
        yield "experts with tensor parallelism need sequence_parallel=True"
    if placement.expert_parallel > 1 and placement.layers_on_first_stage <= placement.dense_layers:
        # Stages with experts reduce the gradient norm of their expert optimizer over all stages, but a stage without
        # experts has no such optimizer and would never take part.
        yield (
            f"the first pipeline stage has {placement.layers_on_first_stage} layers, all dense, but expert parallelism "
            f"needs experts in every stage. Start num_layer_list with more than {placement.dense_layers}"
        )


def _router_findings(placement: ExpertPlacement) -> Iterator[str]:
    experts, groups = placement.experts, placement.groups
    if experts % groups:
        yield f"{experts} experts do not divide into {groups} groups"
    if not 1 <= placement.chosen_groups <= groups:
        yield "moe_router_group_topk must lie between 1 and moe_router_num_groups"
    if placement.chosen > experts // groups * placement.chosen_groups:
        yield "moe_router_topk exceeds the number of experts in the chosen groups"
