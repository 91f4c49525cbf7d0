"""Causal attention over packed sequences through the NPU's fused operator.

Sequences of a micro batch are concatenated along the token axis ("TND" layout), described by megatron-core's
``PackedSeqParams.cu_seqlens_q``.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch_npu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

_COMPRESSED_MASK_SIZE = 2048
"""Side of the triangular mask that npu_fusion_attention demands in its compressed (sparse) modes."""

_RIGHT_DOWN_CAUSAL = 3
"""sparse_mode in which every sequence has its own causal triangle, aligned at its end."""


@dataclass(frozen=True)
class PackedSequences:
    """Positions of a micro batch's sequences on the token axis."""

    ends: list[int]
    """Index after the last token of each sequence, on the host, as the operator requires it."""

    positions: torch.Tensor
    """int64 [tokens] on the device: index of every token within its own sequence."""

    @staticmethod
    def of(packed_seq_params: PackedSeqParams) -> "PackedSequences":
        """Return the layout that ``packed_seq_params`` describes, computed once and cached on it for all layers.

        Reading the ends on the host waits for the device, so it is done once per micro batch instead of once per layer.
        """
        known = packed_seq_params.__dict__.get("_packed_sequences")
        if known is None:
            bounds = packed_seq_params.cu_seqlens_q.tolist()
            device = packed_seq_params.cu_seqlens_q.device
            positions = [torch.arange(end - start) for start, end in zip(bounds, bounds[1:], strict=False)]
            known = PackedSequences(ends=bounds[1:], positions=torch.cat(positions).to(device))
            packed_seq_params.__dict__["_packed_sequences"] = known
        return known


@lru_cache(maxsize=8)
def _causal_mask(device: torch.device) -> torch.Tensor:
    ones = torch.ones(_COMPRESSED_MASK_SIZE, _COMPRESSED_MASK_SIZE, dtype=torch.bool, device=device)
    return ones.triu(diagonal=1)


def packed_causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: PackedSequences, scale: float
) -> torch.Tensor:
    """Compute causal attention within each packed sequence.

    ``query`` [tokens, heads, d], ``key`` [tokens, kv_heads, d], ``value`` [tokens, kv_heads, d_v] with
    ``d_v <= d`` and ``heads`` a multiple of ``kv_heads``; returns [tokens, heads, d_v] in the dtype of ``value``.
    ``scale`` multiplies the scores before the softmax.
    """
    return torch_npu.npu_fusion_attention(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        query.shape[1],
        "TND",
        atten_mask=_causal_mask(query.device),
        scale=scale,
        sparse_mode=_RIGHT_DOWN_CAUSAL,
        actual_seq_qlen=sequences.ends,
        actual_seq_kvlen=sequences.ends,
    )[0]


class PackedDotProductAttention(MegatronModule):
    """Core attention for megatron-core's ``SelfAttention`` on packed sequences, without dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"packed attention has no dropout, but attention_dropout is {dropout}")
        self._scale = 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: object = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attention of [tokens, heads, d] inputs; raises ``ValueError`` when the sequences are not packed."""
        if packed_seq_params is None:
            raise ValueError("attention on the NPU needs packed sequences (packed_seq_params)")
        return packed_causal_attention(query, key, value, PackedSequences.of(packed_seq_params), self._scale)
