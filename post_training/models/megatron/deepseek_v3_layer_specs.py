"""The layers of a pipeline stage of DeepSeek-V3."""

from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from post_training.models.megatron.deepseek_v3_config import DeepseekV3TransformerConfig
from post_training.models.megatron.group_limited_router import GroupLimitedRouter
from post_training.models.megatron.multi_latent_attention import MLASelfAttention
from post_training.models.megatron.npu_rms_norm import NpuRMSNorm
from post_training.models.megatron.sharded_moe_layer import ShardedMoELayer
from post_training.models.megatron.staged_layer import StagedLayer


def deepseek_v3_block_spec(config: DeepseekV3TransformerConfig) -> TransformerBlockSubmodules:
    """Return the layers of this rank's pipeline stage, built from this project's modules."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    first = config.first_layer_of_stage(stage)
    layers = range(first, first + config.layers_on_stage(stage))
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(dense=layer < config.first_k_dense_replace) for layer in layers],
        layer_norm=NpuRMSNorm,
    )


def _layer_spec(dense: bool) -> ModuleSpec:
    feed_forward = ModuleSpec(module=ShardedMoELayer, params={"router": GroupLimitedRouter})
    if dense:
        feed_forward = ModuleSpec(module=MLP, submodules=MLPSubmodules(ColumnParallelLinear, RowParallelLinear))
    return ModuleSpec(
        module=StagedLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=NpuRMSNorm,
            self_attention=ModuleSpec(module=MLASelfAttention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=NpuRMSNorm,
            mlp=feed_forward,
            mlp_bda=get_bias_dropout_add,
        ),
    )
