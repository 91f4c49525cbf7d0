"""The exact loss at Megatron's schedule, which handles every micro batch of an update, its loss and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.features.exact_loss.shares import TOKEN_MEAN, Amounts, count, share
from verl_patches.features.exact_loss.sums import sums_over_ranks

# Metrics that verl reports for every micro batch: terms of the loss, aggregated like it, and means over tokens.
LOSSES = ("actor/pg_loss", "actor/kl_loss", "critic/vf_loss")
TOKEN_MEANS = (
    "actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower", "critic/vf_clipfrac", "critic/vpred_mean",
)  # fmt: skip
Weights = tuple[float, float]
_of_critic: list[str] = []


@contextmanager
def of_critic(mode: str) -> Iterator[None]:
    """Mark schedules that are requested within this context as the critic's, with its `loss_agg_mode`."""
    _of_critic.append(mode)
    try:
        yield
    finally:
        _of_critic.pop()


def critics_mode() -> str:
    """Return the `loss_agg_mode` of the innermost `of_critic` context."""
    return _of_critic[-1]


def with_exact_loss(schedule: Callable[..., Any], mode: str, group: dist.ProcessGroup) -> Callable[..., Any]:
    """Give Megatron's forward-backward `schedule` the loss and the metrics of one pass over the whole mini batch.

    verl's forward step returns the loss as a `functools.partial` with the micro batch under the keyword `data`, and the
    partial returns the loss and `[metrics, entropy]`, or for a critic the loss and its metrics. Forward-only passes are
    left unchanged.

    Args:
        schedule: Megatron's.
        mode: verl's `loss_agg_mode`.
        group: the data-parallel ranks, which hold the mini batch together and whose gradients Megatron averages.
    """

    def run(*, forward_step_func: Callable[..., Any], data_iterator: Any, forward_only: bool, **options: Any) -> Any:
        if forward_only:
            return schedule(
                forward_step_func=forward_step_func, data_iterator=data_iterator, forward_only=True, **options
            )
        of_chunks = isinstance(data_iterator, list)  # one iterator for each model chunk of a virtual pipeline
        chunks = [list(each) for each in (data_iterator if of_chunks else [data_iterator])]
        update = _Update(mode, chunks[0], group)
        weighed = [zip(batches, update.weights, strict=True) for batches in chunks]
        outputs = schedule(
            forward_step_func=update.weighing(forward_step_func),
            data_iterator=weighed if of_chunks else weighed[0],
            forward_only=False,
            **options,
        )
        update.report(outputs)
        return outputs

    return run


class _Update:
    """The micro batches of one update on this rank. Construction is collective: one all-reduce.

    Attributes:
        weights: for each micro batch, the weight of its loss and that of its token means in the update.
    """

    def __init__(self, mode: str, batches: list[Any], group: dist.ProcessGroup):
        mine = torch.stack([count(_response_mask(batch)) for batch in batches])
        self._group, self._device = group, mine.device
        total = mine.sum(dim=0)
        dist.all_reduce(total, group=group)
        *parts, whole = (Amounts(*row) for row in torch.cat([mine, total[None]]).tolist())
        self._average = 1 / (len(batches) * dist.get_world_size(group))
        self.weights = [(share(mode, part, whole), share(TOKEN_MEAN, part, whole)) for part in parts]

    def weighing(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `forward_step` for an iterator of micro batches paired with their weights."""

        def step(batches: Iterator[tuple[Any, Weights]], model: Any) -> Any:
            batch, weights = next(batches)
            output, loss = forward_step(iter([batch]), model)
            # A partial again, because other features read the micro batch from its keyword `data`.
            return output, partial(self._weighed, loss, weights, data=loss.keywords["data"])

        return step

    def _weighed(self, loss: partial, weights: Weights, output: Any, *, data: Any) -> Any:
        value, told = loss(output)
        metrics = _metrics_of(told)
        of_loss, of_tokens = weights
        weighed = {name: of_loss for name in LOSSES} | {name: of_tokens for name in TOKEN_MEANS}
        for name in weighed.keys() & metrics.keys():
            metrics[name] = _times(metrics[name], weighed[name])
        return value * (of_loss / self._average), told

    def report(self, outputs: list[Any]) -> None:
        """Let the first micro batch report the sums over all micro batches and ranks, which are the mini batch's; the
        other micro batches keep only their remaining metrics.

        Collective over the ranks of the last stage, the only one with outputs.
        """
        if not outputs:
            return
        told = [_metrics_of(output) for output in outputs]
        names = [name for name in (*LOSSES, *TOKEN_MEANS) if name in told[0]]
        values = torch.tensor([[_number(metrics[name]) for name in names] for metrics in told]).sum(dim=0)
        mine = dict(zip(names, values.tolist(), strict=True))
        for name, value in sums_over_ranks(mine, (*LOSSES, *TOKEN_MEANS), self._device, self._group).items():
            listed = isinstance(told[0][name], list)
            for metrics in told:
                del metrics[name]
            told[0][name] = [value] if listed else value


def _metrics_of(told: Any) -> dict[str, Any]:
    """Return the metrics of a micro batch from the second value that its loss function returned."""
    return told if isinstance(told, dict) else told[0]


def _response_mask(batch: Any) -> torch.Tensor:
    """Return the mask of the response tokens that verl's loss counts: [sequences, response length]."""
    return batch["attention_mask"][:, -batch["responses"].size(1) :]


def _times(value: Any, factor: float) -> Any:
    """Multiply a metric, which verl reports as a number or a list of one."""
    return [each * factor for each in value] if isinstance(value, list) else value * factor


def _number(value: Any) -> float:
    return value[0] if isinstance(value, list) else value
