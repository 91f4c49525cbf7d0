"""Multi-head latent attention (MLA) for megatron-core 0.8.0.

DeepSeek-V2, arXiv:2405.04434, section 2.1: query and key/value are projected down to a small width, normalised and
projected up per head; a rotary part of the key is shared by all heads. Parameter names are those of MindSpeed-LLM
v2.0.0: ``linear_qkv`` (both down projections, replicated), ``q_layernorm``, ``k_layernorm``, ``linear_qb``,
``linear_kvb`` (up projections, cut over heads) and ``linear_proj`` (output, cut over heads).
"""

import torch
import torch.nn.functional as F
import torch_npu
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from post_training.models.megatron.deepseek_v3_config import DeepseekV3TransformerConfig
from post_training.models.megatron.npu_rms_norm import NpuRMSNorm
from post_training.models.megatron.packed_attention import PackedSequences, packed_causal_attention
from post_training.models.megatron.yarn_rotary_pos_embedding import YarnRotaryEmbedding, attention_temperature


class ReplicatedLinear(torch.nn.Module):
    """A linear map without bias that every tensor-parallel rank holds whole.

    Under sequence parallelism each rank applies it to its own tokens, so its gradient is marked for the sum over them.
    """

    def __init__(self, input_size: int, output_size: int, config: DeepseekV3TransformerConfig) -> None:
        super().__init__()
        device = torch.device("npu", torch.npu.current_device())
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        if config.perform_initialization:
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., input_size] to [..., output_size]."""
        return F.linear(hidden_states, self.weight)


def to_half_layout(rotary: torch.Tensor) -> torch.Tensor:
    """Move the even entries of the last axis before the odd ones.

    DeepSeek-V3's weights produce rotary planes as neighbouring pairs; the fused operator rotates pairs that are half
    the width apart. Scores do not change because query and key are permuted alike.
    """
    pairs = rotary.unflatten(-1, (-1, 2))
    return torch.cat((pairs[..., 0], pairs[..., 1]), dim=-1)


def rotate(rotary: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to ``rotary`` [tokens, heads, dim]; the result is in half layout.

    ``cosine`` and ``sine`` are [tokens, 1, dim]. The operator takes four axes, hence the leading one.
    """
    half_layout = to_half_layout(rotary).unsqueeze(0)
    return torch_npu.npu_rotary_mul(half_layout, cosine.unsqueeze(0), sine.unsqueeze(0)).squeeze(0)


class MLASelfAttention(MegatronModule):
    """Self-attention of one DeepSeek-V3 layer on packed sequences."""

    def __init__(self, config: DeepseekV3TransformerConfig, layer_number: int) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError(f"MLA on the NPU has no dropout, but attention_dropout is {config.attention_dropout}")
        self.layer_number = layer_number
        self._heads = config.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
        self._query_head_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
        temperature = attention_temperature(config.rotary_scaling_factor, config.mscale_all_dim)
        self._scale = self._query_head_dim**-0.5 * temperature**2
        self._rotary = YarnRotaryEmbedding(
            config.qk_pos_emb_head_dim,
            config.rotary_base,
            config.rotary_scaling_factor,
            config.original_max_position_embeddings,
            config.beta_fast,
            config.beta_slow,
            config.mscale,
            config.mscale_all_dim,
        )
        self._build_parameters(config)

    def _build_parameters(self, config: DeepseekV3TransformerConfig) -> None:
        latent_width = config.q_lora_rank + config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_qkv = ReplicatedLinear(config.hidden_size, latent_width, config)
        self.q_layernorm = NpuRMSNorm(config, config.q_lora_rank, config.layernorm_epsilon)
        self.k_layernorm = NpuRMSNorm(config, config.kv_lora_rank, config.layernorm_epsilon)

        def up_projection(input_size: int, head_dim: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                input_size,
                config.num_attention_heads * head_dim,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
            )

        self.linear_qb = up_projection(config.q_lora_rank, self._query_head_dim)
        self.linear_kvb = up_projection(config.kv_lora_rank, config.qk_head_dim + config.v_head_dim)
        self.linear_proj = RowParallelLinear(
            config.num_attention_heads * config.v_head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        inference_params: object = None,
        rotary_pos_emb: object = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[torch.Tensor, None]:
        """[tokens (of this rank under sequence parallelism), 1, hidden] to the same shape, and no bias.

        Only ``packed_seq_params`` says what attends to what; ``attention_mask`` and ``rotary_pos_emb`` are ignored.
        Raises ``ValueError`` when the sequences are not packed.
        """
        if packed_seq_params is None:
            raise ValueError("MLA on the NPU needs packed sequences (packed_seq_params)")
        sequences = PackedSequences.of(packed_seq_params)
        query, key, value = self._query_key_value(hidden_states, sequences)
        context = packed_causal_attention(query, key, value, sequences, self._scale)
        return self.linear_proj(context.flatten(1).unsqueeze(1))

    def _query_key_value(
        self, hidden_states: torch.Tensor, sequences: PackedSequences
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query and key [tokens, local heads, qk_head_dim + rotary], value [tokens, local heads, v_head_dim]."""
        config = self.config
        latent_widths = [config.q_lora_rank, config.kv_lora_rank, config.qk_pos_emb_head_dim]
        query_latent, kv_latent, key_rotary = self.linear_qkv(hidden_states).split(latent_widths, dim=-1)
        query, _ = self.linear_qb(self.q_layernorm(query_latent.contiguous()))
        key_value, _ = self.linear_kvb(self.k_layernorm(kv_latent.contiguous()))
        if config.sequence_parallel:
            key_rotary = gather_from_sequence_parallel_region(key_rotary)

        tokens = query.shape[0]
        query = query.view(tokens, self._heads, self._query_head_dim)
        key_value = key_value.view(tokens, self._heads, config.qk_head_dim + config.v_head_dim)
        key_plain, value = key_value.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        query_plain, query_rotary = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)

        cosine, sine = self._rotary(sequences.positions, query.dtype)
        query_rotary = rotate(query_rotary, cosine, sine)
        key_rotary = rotate(key_rotary.view(tokens, 1, -1), cosine, sine)
        query = torch.cat((query_plain, query_rotary), dim=-1)
        key = torch.cat((key_plain, key_rotary.expand(-1, self._heads, -1)), dim=-1)
        return query, key, value
