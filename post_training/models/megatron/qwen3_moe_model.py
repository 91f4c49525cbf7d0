"""Build the part of a Qwen3-MoE that a pipeline stage holds."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from post_training.models.megatron.moe_config import MoETransformerConfig, parallelism, types
from post_training.models.megatron.npu_rms_norm import NpuRMSNorm
from post_training.models.megatron.packed_layer_specs import packed_attention_spec
from post_training.models.megatron.sharded_moe_layer import ShardedMoELayer
from post_training.models.megatron.softmax_router import SoftmaxRouter
from post_training.models.megatron.staged_layer import StagedLayer


def qwen3_moe_config(hf_config: Any, dtype: torch.dtype, **overrides: Any) -> MoETransformerConfig:
    """Translate a HuggingFace ``Qwen3MoeConfig`` for the parallel layout that ``parallel_state`` holds now.

    ``dtype`` is that of the parameters and of what pipeline stages exchange. ``overrides`` replace single fields
    (Hydra's ``override_transformer_config``). Raises ``ValueError`` for a checkpoint the model cannot represent.
    """
    if hf_config.rope_scaling:
        raise ValueError(f"rope_scaling {hf_config.rope_scaling} is not supported for Qwen3-MoE. Set it to null")
    fields = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": hf_config.head_dim,
        "ffn_hidden_size": hf_config.intermediate_size,
        "attention_dropout": hf_config.attention_dropout,
        "hidden_dropout": 0.0,
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "num_moe_experts": hf_config.num_experts,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_norm_topk_prob": hf_config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        **parallelism(),
        **types(dtype),
    }
    return MoETransformerConfig(**{**fields, **overrides})


def build_qwen3_moe(
    config: MoETransformerConfig,
    hf_config: Any,
    pre_process: bool,
    post_process: bool,
    freeze_moe_router: bool = False,
) -> GPTModel:
    """Return a ``GPTModel`` with the layers of this stage.

    ``pre_process`` adds the embedding, ``post_process`` the final norm and the output layer. ``freeze_moe_router``
    keeps the router weights out of training. Raises ``ValueError`` for a checkpoint that ties the embedding to the
    output layer.
    """
    if hf_config.tie_word_embeddings:
        raise ValueError("Qwen3-MoE with tied word embeddings is not supported")
    layer = ModuleSpec(
        module=StagedLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=packed_attention_spec(config),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=NpuRMSNorm,
            mlp=ModuleSpec(module=ShardedMoELayer, params={"router": SoftmaxRouter}),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    here = config.layers_on_stage(parallel_state.get_pipeline_model_parallel_rank())
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[layer] * here, layer_norm=NpuRMSNorm),
        vocab_size=hf_config.vocab_size,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=hf_config.rope_theta,
    )
    if freeze_moe_router:
        for decoder_layer in model.decoder.layers:
            decoder_layer.mlp.router.weight.requires_grad = False
    return model
