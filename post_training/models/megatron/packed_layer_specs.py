"""Dense decoder layers (Qwen2.5, Llama) on packed sequences from megatron-core 0.8.0's own modules and NPU operators.

Parameter names are those of megatron-core's transformer_engine spec, where a norm belongs to the projection after it,
because verl's weight loader and converters know only those.
"""

from typing import Any

import torch
import torch_npu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from post_training.models.megatron.npu_rms_norm import NpuRMSNorm
from post_training.models.megatron.packed_attention import PackedDotProductAttention


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm of the input and then a column-parallel projection; the norm's weight is ``layer_norm_weight``."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        device = torch.device("npu", torch.npu.current_device())
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype, device=device))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[..., input_size] to [..., output_size / tensor parallel size], and the bias if it is not added."""
        normed = torch_npu.npu_rms_norm(input_, self.layer_norm_weight, epsilon=self.config.layernorm_epsilon)[0]
        return super().forward(normed, *args, **kwargs)


def packed_attention_spec(config: TransformerConfig) -> ModuleSpec:
    """Return causal attention on packed sequences, with norms of query and key heads if the configuration has them."""
    head_norm = NpuRMSNorm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=NormColumnParallelLinear,
        core_attention=PackedDotProductAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    return ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention)


def packed_block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return the dense decoder layers of this pipeline stage.

    Raises ``ValueError`` for a norm other than RMSNorm and for experts, which this spec does not build.
    """
    if config.normalization != "RMSNorm":
        raise ValueError(f"normalization {config.normalization!r} is not supported: only RMSNorm")
    if config.num_moe_experts is not None:
        raise ValueError("verl's own models with experts are not supported on megatron-core 0.8.0")
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=packed_attention_spec(config),
            self_attn_bda=get_bias_dropout_add,
            mlp=ModuleSpec(MLP, submodules=MLPSubmodules(NormColumnParallelLinear, RowParallelLinear)),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=NpuRMSNorm)
