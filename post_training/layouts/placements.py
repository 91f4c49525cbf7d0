"""Read how Megatron and vLLM laid out the ranks of this process group, in the terms of the reshard layouts."""

from typing import Any

from post_training.layouts.layout import RolloutPlacement, TrainPlacement


class PlacementError(RuntimeError):
    """The sharding specs do not describe the parallel layout that is in use."""


def train_placement(transformer_config: Any, whole_experts: bool = False) -> TrainPlacement:
    """Read Megatron's placement.

    Args:
        transformer_config: the training model's.
        whole_experts: Megatron-core 0.16 spreads whole experts over tensor parallel ranks too, and counts these ranks
            in the size of its expert parallel groups (expert_tensor_parallel_size=1), which is a multiple of tp.

    Raises:
        PlacementError: num_layer_list is combined with virtual stages, or Megatron numbers its ranks in another order
            than the sharding specs.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from verl.utils.megatron_utils import get_transformer_layer_offset

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    if virtual > 1 and hasattr(transformer_config, "first_layer_of_stage"):
        raise PlacementError("num_layer_list with virtual pipeline stages is not supported on megatron-core 0.8.0")
    parts = [(stage, chunk) for chunk in range(virtual) for stage in range(stages)]
    edges = [get_transformer_layer_offset(*part, transformer_config) for part in parts] + [
        transformer_config.num_layers
    ]
    tp = parallel_state.get_tensor_model_parallel_world_size()
    placement = TrainPlacement(
        tp=tp,
        pp=stages,
        ep=parallel_state.get_expert_model_parallel_world_size() // (tp if whole_experts else 1),
        # Ranks that share sequences hold the same weights, and lie within a data-parallel group.
        dp=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        num_layer_list=tuple(stop - start for start, stop in zip(edges, edges[1:], strict=False)),
        moe_tp_extend_ep=whole_experts or getattr(transformer_config, "moe_tp_extend_ep", False),
        virtual_stages=virtual,
    )
    rank = dist.get_rank()
    expert_rank = placement.tp_ep_rank(rank) if whole_experts else placement.ep_rank(rank)
    expected = (placement.tp_rank(rank), placement.pp_rank(rank), placement.dp_rank(rank), expert_rank)
    found = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_expert_model_parallel_rank(),
    )
    if found != expected:
        raise PlacementError(
            f"rank {rank} is (tp, pp, dp, ep) {found} in Megatron, but {expected} in the order tp-cp-ep-dp-pp, which "
            "reshard needs"
        )
    return placement


def rollout_placement(vllm_config: Any) -> RolloutPlacement:
    """Read the placement of a running vLLM-Ascend engine.

    Raises PlacementError for an expert map of vLLM-Ascend, pipeline parallelism, or another order of the ranks.
    """
    import torch.distributed as dist
    from vllm.distributed import parallel_state
    from vllm_ascend.ascend_config import get_ascend_config

    parallel, ascend = vllm_config.parallel_config, get_ascend_config()
    if ascend.expert_map_path or ascend.dynamic_eplb:
        raise PlacementError("reshard does not know where expert_map_path or dynamic_eplb put experts. Switch them off")
    if parallel.pipeline_parallel_size > 1:
        raise PlacementError("reshard does not support pipeline parallelism in the rollout")
    size = parallel.tensor_parallel_size * parallel.data_parallel_size
    graph = ascend.torchair_graph_config
    # vLLM-Ascend at the cluster's pin has no parallel size of its own for the output layer.
    output_layer = max(getattr(parallel, "lmhead_tp_size", 0), 0)
    placement = RolloutPlacement(
        tp=parallel.tensor_parallel_size,
        dp=parallel.data_parallel_size,
        ep=size if parallel.enable_expert_parallel else 1,
        instances=dist.get_world_size() // size,
        shared_expert_replicated=graph.enable_multistream_moe if graph.enabled else ascend.enable_prefill_optimizations,
        lm_head_tp=output_layer or None,
    )
    rank = dist.get_rank()
    expected = (placement.tp_rank(rank), placement.tp_dp_rank(rank))
    found = (parallel_state.get_tp_group().rank_in_group, parallel_state.get_ep_group().rank_in_group)
    if found != expected:
        raise PlacementError(f"rank {rank} is (tp, ep) {found} in vLLM, but {expected} in the sharding specs")
    return placement
