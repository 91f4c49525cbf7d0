"""The queue of prompts: those that were given back come first, then every epoch's in its order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from verl_patches.features.data_order.order import DataOrder, DataOrderError


class Prompt(NamedTuple):
    """A row of the training data, and the epoch (from 0) to which it belongs."""

    epoch: int
    row: int


class PromptQueue:
    """Hands out the rows of `epochs` epochs, each in the order that `order` gives it.

    Every row is handed out once per epoch; a row that is given back comes again before all others. With 4 rows in the
    order 2 0 3 1, `take(3)` is rows 2 0 3; give back 3, and `take(3)` is 3 1 and the first row of the next epoch.
    """

    def __init__(self, order: DataOrder, epochs: int, used: int | None = None) -> None:
        """
        Args:
            order: the order of every epoch.
            epochs: number of epochs.
            used: how many rows of each epoch are handed out, from the start of its order; by default all.
        """
        self._order, self._epochs, self._used = order, epochs, order.rows if used is None else used
        self._fresh = Prompt(0, 0)  # the place of the next row in its epoch's order
        self._returned: list[Prompt] = []
        self._permutation: tuple[int, list[int]] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next row that was never handed out; the last epoch if there is no such row."""
        return min(self._fresh.epoch, self._epochs - 1)

    def take(self, count: int) -> list[Prompt]:
        """Take the next `count` prompts; fewer at the end of the last epoch."""
        taken, self._returned = self._returned[:count], self._returned[count:]
        while len(taken) < count and self._fresh.epoch < self._epochs:
            epoch, place = self._fresh
            rows = self._rows(epoch)[: self._used][place : place + count - len(taken)]
            taken += [Prompt(epoch, row) for row in rows]
            place += len(rows)
            self._fresh = Prompt(epoch + 1, 0) if place >= self._used else Prompt(epoch, place)
        return taken

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Return prompts to the head of the queue, in their order."""
        self._returned = [*prompts, *self._returned]

    def _rows(self, epoch: int) -> list[int]:
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, self._order.permutation(epoch)
        return self._permutation[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the queue as JSON values."""
        return {
            "epoch": self._fresh.epoch,
            "position": self._fresh.row,
            "returned": [list(prompt) for prompt in self._returned],
            "rows": self._order.rows,
            "seed": self._order.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position in `state`.

        Raises:
            DataOrderError: it belongs to other data, or is not the state of a queue.
        """
        try:
            fresh = Prompt(int(state["epoch"]), int(state["position"]))
            returned = [Prompt(int(epoch), int(row)) for epoch, row in state["returned"]]
            found = {name: state[name] for name in ("rows", "seed")}
        except (KeyError, TypeError, ValueError) as error:
            raise DataOrderError(
                "the checkpoint has no queue of prompts, so it was written with algorithm.filter_groups.enable=False. "
                "Resume with that, or from another checkpoint"
            ) from error
        for name, key, here in (
            ("rows", "rows of data.train_files", self._order.rows),
            ("seed", "data.seed", self._order.seed),
        ):
            if found[name] != here:
                raise DataOrderError(
                    f"the checkpoint was written with {key}={found[name]}, but this run has {here}, so its queue of "
                    "prompts is meaningless here. Use the same data and settings"
                )
        if fresh.epoch < 0 or not all(0 <= row < self._order.rows for row in (fresh.row, *(p.row for p in returned))):
            raise DataOrderError(
                f"the checkpoint's queue, epoch {fresh.epoch} and row {fresh.row} after {len(returned)} returned "
                f"prompts, does not exist in {self._order.rows} rows. Resume from another checkpoint"
            )
        self._fresh, self._returned = fresh, returned
