"""Configurations of megatron-core 0.8.0 for decoders with routed experts.

The fields that 0.8.0 does not know are declared here. Their names follow later megatron-core releases where those have
one, and MindSpeed-LLM v2.0.0 for ``num_layer_list``, ``first_k_dense_replace`` and ``moe_tp_extend_ep``.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from post_training.models.expert_placement import ExpertPlacement, expert_placement_findings
from post_training.models.sentences import reject


@dataclass
class MoETransformerConfig(TransformerConfig):
    """Configuration of a decoder with routed experts, whole experts over tensor x expert parallel ranks.

    Raises ``ValueError`` for a combination that the model cannot honour, and ``TypeError`` (from the generated
    ``__init__``) for an unknown field, so a misspelt Hydra override never passes silently.
    """

    first_k_dense_replace: int = 0
    """Number of leading layers with a dense feed-forward network instead of experts."""

    moe_ffn_hidden_size: int = 0
    """Hidden width of one routed expert."""

    moe_shared_expert_intermediate_size: int = 0
    """Hidden width of all shared experts together; 0 means none."""

    moe_router_num_groups: int = 1
    """Number of groups the experts are divided into (``n_group``)."""

    moe_router_group_topk: int = 1
    """Number of groups a token may choose experts from (``topk_group``)."""

    moe_router_topk_scaling_factor: float = 1.0
    """Factor on the routing weights (``routed_scaling_factor``)."""

    moe_router_norm_topk_prob: bool = True
    """Whether the routing weights of a token are normalised to sum 1 before scaling."""

    moe_router_force_load_balancing: bool = False
    """Deal tokens out to experts in turn instead of by their scores, for benchmarks."""

    moe_tp_extend_ep: bool = True
    """Shard whole experts over tensor x expert parallel ranks instead of cutting each expert over tensor parallel
    ranks. The only arrangement that this model implements."""

    num_layer_list: list[int] = field(default_factory=list)
    """Number of layers on each pipeline stage; empty means an equal share each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        reject(
            expert_placement_findings(
                ExpertPlacement(
                    layers=self.num_layers,
                    stages=self.pipeline_model_parallel_size,
                    virtual_stages=self.virtual_pipeline_model_parallel_size,
                    num_layer_list=tuple(self.num_layer_list),
                    dense_layers=self.first_k_dense_replace,
                    experts=self.num_moe_experts or 0,
                    groups=self.moe_router_num_groups,
                    chosen_groups=self.moe_router_group_topk,
                    chosen=self.moe_router_topk,
                    tensor_parallel=self.tensor_model_parallel_size,
                    expert_parallel=self.expert_model_parallel_size,
                    context_parallel=self.context_parallel_size,
                    sequence_parallel=self.sequence_parallel,
                    whole_experts=self.moe_tp_extend_ep,
                )
            )
        )

    def layers_on_stage(self, stage: int) -> int:
        """Number of decoder layers on pipeline stage ``stage`` (0-based)."""
        return (
            self.num_layer_list[stage] if self.num_layer_list else self.num_layers // self.pipeline_model_parallel_size
        )

    def first_layer_of_stage(self, stage: int) -> int:
        """0-based index of the first decoder layer on pipeline stage ``stage``."""
        return sum(self.layers_on_stage(earlier) for earlier in range(stage))


def types(dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields for the type of parameters and of the tensors that pipeline stages exchange."""
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
    }


def parallelism() -> dict[str, Any]:
    """Return the fields of the parallel layout that ``parallel_state`` holds now."""
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    return {
        "tensor_model_parallel_size": tensor_parallel,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "sequence_parallel": tensor_parallel > 1,
        # Packed sequences differ in length from one micro batch to the next, so stages exchange shapes first.
        "variable_seq_lengths": True,
        "batch_p2p_comm": False,
    }
