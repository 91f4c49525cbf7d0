"""Conversion between padded batches [batch, length, ...] and the valid positions alone [valid, ...].

These are the functions of ``flash_attn.bert_padding`` that verl imports, written from their documented behaviour:
flash-attn is a CUDA library, and none of them needs a kernel of its own. ``rearrange`` is einops' function, which that
module re-exports.
"""

import torch
import torch.nn.functional as F
from einops import rearrange

__all__ = ["index_first_axis", "pad_input", "rearrange", "unpad_input"]


def index_first_axis(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return rows ``indices`` (int64 [n]) of ``values`` [rows, ...]; differentiable."""
    return values.index_select(0, indices)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Keep the positions where ``attention_mask`` [batch, length] (or ``unused_mask``) is not zero.

    Returns the kept rows [valid, ...] of ``hidden_states`` [batch, length, ...], their int64 indices into the flattened
    [batch * length], the int32 [batch + 1] bounds of the sequences among them, the longest sequence in tokens, and the
    int32 [batch] number of positions that ``attention_mask`` itself marks.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = (kept != 0).sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    bounds = F.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    used = (attention_mask != 0).sum(dim=-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, bounds, int(lengths.max()), used


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Undo ``unpad_input``: [valid, ...] to [batch, seqlen, ...], zero elsewhere; differentiable."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
