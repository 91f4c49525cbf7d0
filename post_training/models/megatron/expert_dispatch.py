"""Send tokens to the ranks that hold their experts and back, by all-to-all."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all


class _PermuteRows(torch.autograd.Function):
    """Row ``i`` of the result is row ``order[i] // copies`` of the input.

    ``inverse`` is the inverse permutation of ``order``: with it the backward pass is a gather and a sum of fixed order,
    instead of an atomic scatter-add whose order of summation is not defined.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        restored = gradient.index_select(0, inverse)
        if ctx.copies > 1:
            restored = restored.view(-1, ctx.copies, restored.shape[-1]).sum(dim=1)
        return restored, None, None, None


def inverse_permutation(order: torch.Tensor) -> torch.Tensor:
    """Return the permutation that undoes ``order`` (int64 [n])."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return inverse


@dataclass(frozen=True)
class ExpertDispatch:
    """How the tokens of one micro batch travel to their experts. Rank ``r`` of the group holds the experts
    ``[r * local_experts, (r + 1) * local_experts)``."""

    group: dist.ProcessGroup
    copies: int
    """Experts per token."""

    by_expert: torch.Tensor
    """int64 [tokens * copies]: order of this rank's token copies by global expert."""

    rows_to_rank: list[int]
    rows_from_rank: list[int]
    by_local_expert: torch.Tensor
    """int64 [received]: order of the received rows by local expert, ties in order of arrival."""

    counts: torch.Tensor
    """int64 [local experts]: received rows of each local expert."""

    @staticmethod
    def plan(experts: torch.Tensor, num_experts: int, group: dist.ProcessGroup) -> "ExpertDispatch":
        """Exchange in ``group`` how many rows each rank sends to each other, for ``experts`` int64 [tokens, copies]."""
        ranks = dist.get_world_size(group)
        local_experts = num_experts // ranks
        flat = experts.flatten()
        outgoing = torch.bincount(flat, minlength=num_experts).view(ranks, local_experts)
        incoming = outgoing
        if ranks > 1:
            incoming = torch.empty_like(outgoing)
            dist.all_to_all_single(incoming, outgoing, group=group)
        # One transfer to the host for both lists.
        to_rank, from_rank = torch.stack((outgoing.sum(dim=1), incoming.sum(dim=1))).tolist()
        arrival = torch.arange(local_experts, device=flat.device).repeat(ranks).repeat_interleave(incoming.flatten())
        return ExpertDispatch(
            group=group,
            copies=experts.shape[1],
            by_expert=flat.argsort(stable=True),
            rows_to_rank=to_rank,
            rows_from_rank=from_rank,
            by_local_expert=arrival.argsort(stable=True),
            counts=incoming.sum(dim=0),
        )

    def send(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] of this rank to the rows [received, hidden] for its experts, ordered by local expert."""
        copies = _PermuteRows.apply(tokens, self.by_expert, inverse_permutation(self.by_expert), self.copies)
        received = all_to_all(self.group, copies, self.rows_from_rank, self.rows_to_rank)
        return _PermuteRows.apply(received, self.by_local_expert, inverse_permutation(self.by_local_expert), 1)

    def bring_back(self, rows: torch.Tensor) -> torch.Tensor:
        """Undo ``send``: [received, hidden] to [tokens, copies, hidden], one row for each expert of each token."""
        arrived = _PermuteRows.apply(rows, inverse_permutation(self.by_local_expert), self.by_local_expert, 1)
        returned = all_to_all(self.group, arrived, self.rows_to_rank, self.rows_from_rank)
        restored = _PermuteRows.apply(returned, inverse_permutation(self.by_expert), self.by_expert, 1)
        return restored.view(-1, self.copies, restored.shape[-1])
