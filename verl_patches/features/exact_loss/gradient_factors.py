"""The exact loss on FSDP: the gradients of a micro batch's outputs are scaled by its loss weight.

The actor's loss depends on the weights only through log-probs and entropies, the critic's only through its values, and
a loss is linear in its terms: scaling the gradients of the outputs scales the gradient of the loss. The outputs keep
their values, and so do the metrics that verl reports for a micro batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.features.exact_loss.shares import TOKEN_MEAN, Amounts, count, share
from verl_patches.features.exact_loss.sums import sums_over_ranks
from verl_patches.features.exact_loss.update_loss import TOKEN_MEANS


@dataclass(frozen=True)
class Reported:
    """Names of the metrics that verl appends for every micro batch: a loss, and means over tokens."""

    loss: str
    token_means: tuple[str, ...]


# The KL is not among them: verl keeps only its value in the last micro batch.
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
    """The factors of the micro batches of one call of `update_policy` or `update_critic`, in the order of the call.

    Every `mini_rows` rows of this rank are its part of an update. Construction is collective: one all-reduce.
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
            mask: [rows, response length] of all rows of this rank, on the device; not 0 if a token counts.
            mini_rows: see above.
            micro_rows: rows of a micro batch, if verl takes the mean over micro batches; None if it cuts by tokens, and
                weights micro batches by rows.
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
        """Return `values` of the next micro batch, which has this mask, with its factor on their gradients."""
        part = Amounts(*count(mask).tolist())
        # Every epoch of the update starts again from the first row.
        whole = self._whole[self._row % self._rows // self._mini_rows]
        self._row += part.rows
        shares = share(self._mode, part, whole), share(TOKEN_MEAN, part, whole)
        self._shares.append(shares)
        factor = shares[0] / self._averaged(part.rows)
        return [value if value is None else _WithFactor.apply(value, factor) for value in values]

    def _averaged(self, rows: int) -> float:
        """Return the weight of a micro batch of so many rows in the mean that verl and FSDP take."""
        if self._micro_rows is None:
            of_rank = rows / self._mini_rows
        else:
            of_rank = 1 / (self._mini_rows // self._micro_rows)
        return of_rank / dist.get_world_size(self._group)

    def report(self, metrics: dict[str, Any], reported: Reported) -> None:
        """Replace verl's means of micro batches by the mean over the updates. Collective: one all-reduce."""
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
