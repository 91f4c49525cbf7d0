"""vLLM's kernel that maps tokens to slots of the cache, for a whole batch at once.

It is a Triton kernel with a program for each request, launched before every forward: Triton's interpreter takes longer
for it than the emulated device for a layer. Here it is indexing on the host, where the interpreter computes too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def map_slots(
    grid: tuple[int, ...],
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    block_table_stride: int,
    block_size: int,
    slot_mapping: Tensor,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """Write each token's slot in the cache to `slot_mapping`, and PAD_ID from `num_tokens` on.

    Parameters have the kernel's names, without `_ptr`. If ranks share a sequence, a token of another rank gets PAD_ID.
    In the kernel's grid the last program writes the padding, and each other program the tokens of one request.
    """
    requests = grid[0] - 1
    starts = query_start_loc[: requests + 1].cpu().long()
    first, last = int(starts[0]), int(starts[-1])
    if first < last:
        position = positions[first:last].cpu()
        rows = block_table.as_strided((requests, block_table_stride), (block_table_stride, 1)).cpu()
        shared_size = block_size * TOTAL_CP_WORLD_SIZE
        number = rows[torch.arange(requests).repeat_interleave(starts.diff()), position // shared_size].long()
        offset = position % shared_size
        piece = offset // CP_KV_CACHE_INTERLEAVE_SIZE  # ranks own the pieces of a sequence in turn
        own = piece // TOTAL_CP_WORLD_SIZE * CP_KV_CACHE_INTERLEAVE_SIZE + offset % CP_KV_CACHE_INTERLEAVE_SIZE
        slots = torch.where(piece % TOTAL_CP_WORLD_SIZE == TOTAL_CP_RANK, number * block_size + own, PAD_ID)
        slot_mapping[first:last].copy_(slots)
    slot_mapping[num_tokens:max_num_tokens].fill_(PAD_ID)


class MappedAtOnce:
    """Stands in for the kernel: ``kernel[grid](arguments)`` calls `map_slots`; everything else is the kernel's."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **named: map_slots(grid, *arguments, **named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._kernel(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


def replace(module: ModuleType) -> None:
    """Replace the kernel in vllm.v1.worker.block_table, unless Triton has a device or the kernel is another one."""
    from vllm.triton_utils import HAS_TRITON

    kernel = getattr(module, "_compute_slot_mapping_kernel", None)
    if HAS_TRITON or kernel is None:
        return
    if [name.removesuffix("_ptr") for name in inspect.signature(kernel.__wrapped__).parameters] == _PARAMETERS:
        module._compute_slot_mapping_kernel = MappedAtOnce(kernel)


_PARAMETERS = list(inspect.signature(map_slots).parameters)[1:]
