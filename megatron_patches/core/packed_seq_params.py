"""PackedSeqParams with the padded bounds that verl 0.4.0 sets and reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.compatibility.feature import VERL_ON_MEGATRON_CORE

if TYPE_CHECKING:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams


@wrap(
    "megatron.core.packed_seq_params:PackedSeqParams.__init__",
    feature=VERL_ON_MEGATRON_CORE,
    why="verl 0.4.0 passes cu_seqlens_q_padded and cu_seqlens_kv_padded and reads them back when it unpacks",
    upstream="not forwarded: specific to this pair of releases; megatron-core has them since 0.10",
    remove_when="the pinned megatron-core is 0.10 or later",
    evidence="executed",
)
def init(
    upstream: Callable[..., None],
    self: PackedSeqParams,
    *args: Any,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    **kwargs: Any,
) -> None:
    upstream(self, *args, **kwargs)
    self.cu_seqlens_q_padded = cu_seqlens_q_padded
    self.cu_seqlens_kv_padded = cu_seqlens_kv_padded
