"""The exact loss on FSDP: gradients of a micro batch's outputs have its factor.

The actor's loss depends on the weights through log-probs and entropies alone, the critic's through its values, and a
loss is linear in its terms: a factor on the gradients of the outputs is one on the gradient of the loss. The outputs
stay, and with them what verl reports of a micro batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.features.exact_loss.schedule import TOKEN_MEANS
from verl_patches.features.exact_loss.shares import TOKEN_MEAN, Amounts, count, share
from verl_patches.features.exact_loss.sums import sums_over_ranks


@dataclass(frozen=True)
class Reported:
    """What verl appends for every micro batch: a loss, and means over tokens."""

    loss: str
    token_means: tuple[str, ...]


# Of the KL verl keeps the value of the last micro batch alone.
OF_ACTOR = Reported("actor/pg_loss", TOKEN_MEANS)
OF_CRITIC = Reported("critic/vf_loss", ("critic/vf_clipfrac", "critic/vpred_mean"))


class _WithFactor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


class UpdateFactors:
    """The factors of the micro batches of one call of `update_policy` or `update_critic`, asked for in its order.

    Every `mini_rows` rows of this rank are its part of an update. Making one is collective: one all-reduce.
    """

    def __init__(
        self,
        mode: str,
        mask: torch.Tensor,
        mini_rows: int,
        micro_rows: int | None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            mode: verl's `loss_agg_mode`.
            mask: [rows, response length] of all rows of this rank, on the device; not 0 where a token counts.
            micro_rows: rows of a micro batch, over whose number verl takes the mean; None where it cuts by tokens, and
                weighs by rows.
            group: the ranks that hold an update together, and over which FSDP takes the mean of gradients.
        """
        self._mode, self._mini_rows, self._micro_rows, self._group = mode, mini_rows, micro_rows, group
        whole = torch.stack([count(part) for part in mask.split(mini_rows)])
        dist.all_reduce(whole, group=group)
        self._whole = [Amounts(*row) for row in whole.tolist()]
        self._device, self._rows, self._row = mask.device, len(mask), 0
        # By micro batch: its shares in the loss and in the tokens of its update.
        self._shares: list[tuple[float, float]] = []

    def weigh(self, mask: torch.Tensor, *values: torch.Tensor | None) -> list[torch.Tensor | None]:
        """`values` of the next micro batch, whose mask this is, with the factor on their gradients."""
        part = Amounts(*count(mask).tolist())
        # Again from the first row in every epoch.
        whole = self._whole[self._row % self._rows // self._mini_rows]
        self._row += part.rows
        shares = share(self._mode, part, whole), share(TOKEN_MEAN, part, whole)
        self._shares.append(shares)
        factor = shares[0] / self._averaged(part.rows)
        return [value if value is None else _WithFactor.apply(value, factor) for value in values]

    def _averaged(self, rows: int) -> float:
        """What a micro batch of so many rows weighs in the mean of verl and FSDP."""
        if self._micro_rows is None:
            of_rank = rows / self._mini_rows
        else:
            of_rank = 1 / (self._mini_rows // self._micro_rows)
        return of_rank / dist.get_world_size(self._group)

    def report(self, metrics: dict[str, Any], reported: Reported) -> None:
        """Put the mean over the updates in the place of verl's means of micro batches. Collective: one all-reduce."""
        names = (reported.loss, *reported.token_means)
        updates = self._row / self._mini_rows
        # [micro batches, 2]: the shares in the loss and in the tokens.
        shares = torch.tensor(self._shares) / updates
        mine = {
            name: (shares[:, int(name != reported.loss)] @ torch.tensor(metrics[name])).item()
            for name in names
            if name in metrics
        }
        whole = sums_over_ranks(mine, names, self._device, self._group)
        metrics.update((name, [value]) for name, value in whole.items())
