"""The order of prompts: verl's own, as a function of the epoch only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler


class DataOrderError(ValueError):
    """A place in the data cannot be restored; the message is one sentence for the user."""


@dataclass(frozen=True)
class DataOrder:
    """`rows` prompts in batches of `batch_size`, shuffled with `seed`, or in the order of the file (None).

    Rows at the end of an epoch that fill no whole batch are dropped, as in verl.
    """

    rows: int
    batch_size: int
    seed: int | None

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return self.rows // self.batch_size

    def permutation(self, epoch: int) -> list[int]:
        """Return the rows of `epoch` (from 0) in their order, which is that of verl's sampler in an unbroken run.

        torch's RandomSampler keeps one generator and draws from it twice per epoch: the order, and, when the loader
        asks for a row beyond the last one, another order that it does not use. Epoch 2 is the fifth draw.
        """
        if self.seed is None:
            return list(range(self.rows))
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(2 * epoch):
            torch.randperm(self.rows, generator=generator)
        return torch.randperm(self.rows, generator=generator).tolist()


@dataclass(frozen=True)
class Place:
    """The place that training has reached: `position` rows of `epoch` have been trained on. Both count from 0."""

    epoch: int = 0
    position: int = 0

    def after_a_batch(self, order: DataOrder) -> Place:
        """Return the place one batch further; the next epoch follows an epoch's last whole batch."""
        position = self.position + order.batch_size
        beyond = position + order.batch_size > order.rows
        return Place(self.epoch + 1) if beyond else Place(self.epoch, position)

    def batches_before(self, order: DataOrder) -> int:
        """Return the number of batches from the start of training to here."""
        return self.epoch * order.batches + self.position // order.batch_size


class PlacedSampler(Sampler[int]):
    """Rows of `order()` from `place` to the end of its epoch. `order` is called only when rows are asked for."""

    def __init__(self, order: Callable[[], DataOrder]) -> None:
        self._order = order
        self.place = Place()

    def __iter__(self) -> Iterator[int]:
        yield from self._order().permutation(self.place.epoch)[self.place.position :]

    def __len__(self) -> int:
        return self._order().rows


def read_place(state: Mapping[str, Any], order: DataOrder) -> Place:
    """Read the place that `place_state` wrote.

    Raises:
        DataOrderError: the state belongs to other data, or is invalid.
    """
    try:
        epoch, position = int(state["epoch"]), int(state["position"])
        found = {name: state[name] for name in ("rows", "batch_size", "seed")}
    except (KeyError, TypeError, ValueError) as error:
        raise DataOrderError(
            f"the checkpoint does not record how far the data had been read ({error!r}). Resume from another checkpoint"
        ) from error
    for name, here in (("rows", order.rows), ("batch_size", order.batch_size), ("seed", order.seed)):
        if found[name] != here:
            raise DataOrderError(
                f"the checkpoint was written with {_CALLED[name]}={found[name]}, but this run has {here}, so its place "
                "in the data is meaningless here. Use the same data and settings"
            )
    if epoch < 0 or position < 0 or position % order.batch_size or position >= order.rows:
        raise DataOrderError(
            f"the checkpoint's place in the data, epoch {epoch} and row {position}, does not exist in {order.rows} "
            f"rows in batches of {order.batch_size}. Resume from another checkpoint"
        )
    return Place(epoch, position)


_CALLED = {"rows": "rows of data.train_files", "batch_size": "data.train_batch_size", "seed": "data.seed"}


def place_state(place: Place, order: DataOrder) -> dict[str, int | None]:
    """Return `place` as numbers, with the rows, batch size and seed that it depends on."""
    return {
        "epoch": place.epoch,
        "position": place.position,
        "rows": order.rows,
        "batch_size": order.batch_size,
        "seed": order.seed,
    }
