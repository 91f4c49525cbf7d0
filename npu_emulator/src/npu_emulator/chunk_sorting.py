"""MindSpeed's sorting of chunks of tokens, whose Triton kernels loop over tokens, by indexing.

In Triton's interpreter, which computes the same, two training steps of a tiny model had not ended after four minutes.
The functions replaced here are those that launch the kernels; MindSpeed's autograd function around them stays.
"""

from __future__ import annotations

import types

import torch


def make_chunk_sort_map(
    split_sizes: torch.Tensor, sorted_indices: torch.Tensor, num_tokens: int, num_splits: int
) -> torch.Tensor:
    """Return the row to which each token goes.

    Args:
        split_sizes: lengths of the chunks, of shape (num_splits,).
        sorted_indices: the chunks in their new order.
        num_tokens: sum of the lengths.
        num_splits: number of chunks.

    Returns:
        Of shape (num_tokens,) and type int32, on the device.
    """
    sizes, order = split_sizes.cpu().long(), sorted_indices.cpu().long()
    first = sizes.cumsum(0) - sizes
    new_first = torch.empty_like(first)
    new_first[order] = sizes[order].cumsum(0) - sizes[order]
    return (torch.arange(num_tokens) + (new_first - first).repeat_interleave(sizes)).int().npu()


def sort_chunks_by_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `inp`, of shape (num_tokens, hidden_size), and `probs` with each row where the map puts it.

    If not `is_forward`, rows return from there.
    """

    def moved(rows: torch.Tensor) -> torch.Tensor:
        if is_forward:
            return torch.empty_like(rows).index_copy_(0, row_id_map.long(), rows)
        return rows.index_select(0, row_id_map)

    return moved(inp), None if probs is None else moved(probs)


def replace(module: types.ModuleType) -> None:
    """Replace what launches kernels in mindspeed.ops.triton.sort_chunks_by_idx."""
    module.make_chunk_sort_map = make_chunk_sort_map
    module.sort_chunks_by_map = sort_chunks_by_map
