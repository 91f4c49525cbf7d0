"""A loader of training prompts that can start anywhere in the data, and the source that takes its next batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from verl_patches.features.data_order.order import DataOrder, Place, PlacedSampler, place_state, read_place
from verl_patches.features.step import Collected, Step, Workers, split


class ResumableLoader:
    """`batches` of an epoch as `sampler` orders them, and the place that training has reached.

    verl asks for one iteration per epoch and counts them from 0, after a resume too. An epoch that was trained before
    the resume therefore yields no batches, so that the loop's own count is the epoch's number: with 4 batches per
    epoch, resumed after 9, the first four iterations yield 0, 0, 3 and 4 batches. No batch is yielded beyond
    `total_steps`, whatever its epoch: verl checks for its last step only after it has trained.

    A batch counts as trained as soon as it is yielded: verl saves while it is in the batch's step.
    """

    def __init__(self, batches: Iterable[Any], sampler: PlacedSampler, order: DataOrder, total_steps: int) -> None:
        self._batches, self._sampler, self._order, self._total_steps = batches, sampler, order, total_steps
        self._place = Place()
        self._epochs_asked_for = 0

    def __len__(self) -> int:
        return self._order.batches

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epochs_asked_for
        self._epochs_asked_for += 1
        if epoch < self._place.epoch or self._is_over():
            return
        self._sampler.place = self._place
        for batch in self._batches:
            self._place = self._place.after_a_batch(self._order)
            yield batch
            if self._is_over():
                return

    def _is_over(self) -> bool:
        return self._place.batches_before(self._order) >= self._total_steps

    def state_dict(self) -> dict[str, int | None]:
        """Return the place, and what it depends on; see `place_state`."""
        return place_state(self._place, self._order)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start from the place in `state`.

        Raises:
            DataOrderError: the state belongs to other data, or is invalid.
        """
        self._place = read_place(state, self._order)
        self._epochs_asked_for = 0


class NextPrompts:
    """Source of batches from the loader's next prompts; each epoch iterates over the loader once."""

    ended_by = None

    def __init__(self, loader: Iterable[Any], epochs: int) -> None:
        self._rows = ((epoch, rows) for epoch in range(epochs) for rows in loader)
        self.metrics: dict[str, float] = {}

    def collect(self, step: Step, workers: Workers) -> Collected | None:
        """Collect the batch of a step; None after the last epoch or the last step."""
        epoch, rows = next(self._rows, (0, None))
        if rows is None:
            return None
        prompts, asked = split(rows)
        with step.timed("gen"):
            answers = workers.generate(asked)
        return Collected(epoch, prompts, asked, answers)
