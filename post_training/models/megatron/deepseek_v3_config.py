"""DeepSeek-V3 as a megatron-core 0.8.0 configuration.

megatron-core 0.8.0 knows neither multi-head latent attention nor DeepSeek's routing, so the fields for both are
declared here. Field names follow later megatron-core releases (``MLATransformerConfig``) where those have one, and
MindSpeed-LLM v2.0.0 for ``num_layer_list``, ``first_k_dense_replace`` and ``moe_tp_extend_ep``.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class DeepseekV3TransformerConfig(TransformerConfig):
    """Configuration of a DeepSeek-V3 decoder.

    Raises ``ValueError`` for a combination that the model cannot honour, and ``TypeError`` (from the generated
    ``__init__``) for an unknown field, so a misspelt Hydra override never passes silently.
    """

    q_lora_rank: int = 1536
    """Width of the compressed query."""

    kv_lora_rank: int = 512
    """Width of the compressed key and value, without the rotary part."""

    qk_head_dim: int = 128
    """Width per head of query and key without position (``qk_nope_head_dim``)."""

    qk_pos_emb_head_dim: int = 64
    """Width of the rotary part of query and key (``qk_rope_head_dim``)."""

    v_head_dim: int = 128
    """Width per head of the value."""

    rotary_base: float = 10000.0
    """Base of the rotary frequencies (``rope_theta``)."""

    rotary_scaling_factor: float = 1.0
    """YaRN context extension factor; 1 means plain rotary embedding."""

    original_max_position_embeddings: int = 4096
    """Context length before the extension, in tokens."""

    beta_fast: float = 32.0
    """Rotations within the original context above which a frequency is kept as it is."""

    beta_slow: float = 1.0
    """Rotations within the original context below which a frequency is divided by the factor."""

    mscale: float = 1.0
    """YaRN attention temperature coefficient of the rotary part."""

    mscale_all_dim: float = 0.0
    """YaRN attention temperature coefficient of all dimensions; 0 leaves the softmax scale alone."""

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
        self._check_pipeline()
        self._check_experts()
        if self.context_parallel_size > 1:
            raise ValueError("DeepSeek-V3 on megatron-core 0.8.0 does not support context_parallel_size > 1")

    def _check_pipeline(self) -> None:
        stages = self.pipeline_model_parallel_size
        if self.virtual_pipeline_model_parallel_size is not None:
            raise ValueError("DeepSeek-V3 on megatron-core 0.8.0 does not support virtual pipeline stages")
        if self.num_layer_list:
            if len(self.num_layer_list) != stages:
                raise ValueError(f"num_layer_list {self.num_layer_list} must name {stages} pipeline stages")
            if sum(self.num_layer_list) != self.num_layers or min(self.num_layer_list) < 1:
                raise ValueError(
                    f"num_layer_list {self.num_layer_list} must be positive and add up to {self.num_layers}"
                )
        elif self.num_layers % stages:
            raise ValueError(f"{self.num_layers} layers do not divide over {stages} stages: set num_layer_list")

    def _check_experts(self) -> None:
        experts = self.num_moe_experts
        if not experts:
            return
        if not self.moe_tp_extend_ep:
            raise ValueError("moe_tp_extend_ep=False is not supported: experts are sharded over TP x EP")
        ranks = self.tensor_model_parallel_size * self.expert_model_parallel_size
        if experts % ranks:
            raise ValueError(f"{experts} experts do not divide over TP x EP = {ranks} ranks")
        if self.tensor_model_parallel_size > 1 and not self.sequence_parallel:
            # Every tensor-parallel rank would dispatch the same tokens and expert gradients would count them TP times.
            raise ValueError("experts with tensor parallelism need sequence_parallel=True")
        if self.expert_model_parallel_size > 1 and self.layers_on_stage(0) <= self.first_k_dense_replace:
            # Stages with experts reduce the gradient norm of their expert optimizer over all stages, and a stage
            # without experts has no such optimizer and would never take part.
            raise ValueError(
                f"the first pipeline stage has {self.layers_on_stage(0)} layers, all dense: with expert parallelism "
                f"every stage needs experts, so num_layer_list must start with more than {self.first_k_dense_replace}"
            )
        if experts % self.moe_router_num_groups:
            raise ValueError(f"{experts} experts do not divide into {self.moe_router_num_groups} groups")
        if not 1 <= self.moe_router_group_topk <= self.moe_router_num_groups:
            raise ValueError("moe_router_group_topk must lie between 1 and moe_router_num_groups")
        if self.moe_router_topk > experts // self.moe_router_num_groups * self.moe_router_group_topk:
            raise ValueError("moe_router_topk exceeds the number of experts in the chosen groups")

    def layers_on_stage(self, stage: int) -> int:
        """Number of decoder layers on pipeline stage ``stage`` (0-based)."""
        return (
            self.num_layer_list[stage] if self.num_layer_list else self.num_layers // self.pipeline_model_parallel_size
        )

    def first_layer_of_stage(self, stage: int) -> int:
        """0-based index of the first decoder layer on pipeline stage ``stage``."""
        return sum(self.layers_on_stage(earlier) for earlier in range(stage))


def deepseek_v3_config_from_huggingface(
    hf_config: Any, dtype: torch.dtype, **overrides: Any
) -> DeepseekV3TransformerConfig:
    """Translate a HuggingFace ``DeepseekV3Config`` for the parallel layout that ``parallel_state`` holds now.

    ``dtype`` is that of the parameters and of what pipeline stages exchange. ``overrides`` replace single fields
    (Hydra's ``override_transformer_config``). Raises ``ValueError`` for a checkpoint the model cannot represent.
    """
    _refuse_unsupported(hf_config)
    fields = {
        **_dimensions(hf_config),
        **_rotary(hf_config),
        **_routing(hf_config),
        **_parallelism(),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
    }
    return DeepseekV3TransformerConfig(**{**fields, **overrides})


def _refuse_unsupported(hf_config: Any) -> None:
    if getattr(hf_config, "num_nextn_predict_layers", 0):
        raise ValueError("multi-token prediction layers are not supported: set num_nextn_predict_layers to 0")
    if getattr(hf_config, "quantization_config", None):
        raise ValueError("the checkpoint is quantised: convert it to bf16 and remove quantization_config")
    if not hf_config.q_lora_rank:
        raise ValueError("DeepSeek-V3 without q_lora_rank is not supported")
    scaling = hf_config.rope_scaling or {"rope_type": "yarn"}
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        raise ValueError(f"rope_scaling {scaling} is not supported: DeepSeek-V3 uses yarn")


def _dimensions(hf_config: Any) -> dict[str, Any]:
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "ffn_hidden_size": hf_config.intermediate_size,
        "kv_channels": hf_config.qk_nope_head_dim,
        "attention_dropout": hf_config.attention_dropout,
        "hidden_dropout": 0.0,
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "q_lora_rank": hf_config.q_lora_rank,
        "kv_lora_rank": hf_config.kv_lora_rank,
        "qk_head_dim": hf_config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf_config.qk_rope_head_dim,
        "v_head_dim": hf_config.v_head_dim,
    }


def _rotary(hf_config: Any) -> dict[str, Any]:
    scaling = hf_config.rope_scaling
    if not scaling:
        return {"rotary_base": hf_config.rope_theta}
    return {
        "rotary_base": hf_config.rope_theta,
        "rotary_scaling_factor": scaling["factor"],
        "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "beta_fast": scaling.get("beta_fast", 32),
        "beta_slow": scaling.get("beta_slow", 1),
        "mscale": scaling.get("mscale", 1.0),
        "mscale_all_dim": scaling.get("mscale_all_dim", 0.0),
    }


def _routing(hf_config: Any) -> dict[str, Any]:
    return {
        "num_moe_experts": hf_config.n_routed_experts,
        "first_k_dense_replace": hf_config.first_k_dense_replace,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": hf_config.moe_intermediate_size * (hf_config.n_shared_experts or 0),
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_num_groups": hf_config.n_group,
        "moe_router_group_topk": hf_config.topk_group,
        "moe_router_topk_scaling_factor": hf_config.routed_scaling_factor,
        "moe_router_norm_topk_prob": hf_config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }


def _parallelism() -> dict[str, Any]:
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
