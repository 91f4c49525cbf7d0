"""The driver's side: keeps the lengths of answers, and orders prompts before verl distributes them among engines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from post_training.plan.first_placement import expected_lengths, first_placement

if TYPE_CHECKING:
    from verl import DataProto

Call = Callable[[Any], Any]
STATE = "answer_lengths"
"""The name of `Placement.state` in a checkpoint."""


class Placement:
    """Wraps verl's call for answers.

    Args:
        engines: number of rollout instances; verl gives each an equal, consecutive part of a batch.
    """

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._lengths: dict[str, float] = {}

    def placing(self, generate: Call) -> Call:
        """Wrap `generate` to get prompts in the order of first placement, and return answers in their original order.

        verl marks prompts for validation, and those that are answered greedily for a baseline, in their meta
        information; they are passed on unchanged.
        """

        def call(prompts: DataProto) -> DataProto:
            if prompts.meta_info.get("validate") or not prompts.meta_info.get("do_sample", True):
                return generate(prompts)
            names = names_of(prompts)
            order = self._order(names)
            if order is None:
                answers = generate(prompts)
            else:
                found = generate(rows_of(prompts, order))
                answers = rows_of(found, _places(order, len(found) // len(order)))
            self._learn(names, answers)
            return answers

        return call

    def _order(self, names: Sequence[str]) -> list[int] | None:
        expected = expected_lengths(names, self._lengths)
        if expected is None or len(names) % self._engines:
            return None
        return first_placement(expected, self._engines)

    def _learn(self, names: Sequence[str], answers: DataProto) -> None:
        width = answers.batch["responses"].size(1)
        lengths = answers.batch["attention_mask"][:, -width:].sum(-1).reshape(len(names), -1)
        means = lengths.double().mean(-1)
        self._lengths.update(zip(names, means.tolist(), strict=True))

    def state(self) -> dict[str, float]:
        """Return the mean length of the last answers to each prompt as JSON values."""
        return dict(self._lengths)

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore what `state` returned."""
        self._lengths = {name: float(length) for name, length in state.items()}


def names_of(prompts: DataProto) -> list[str]:
    """Return a name for each prompt, which depends only on its tokens."""
    tokens, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"].bool()
    contents = (row[kept].numpy().astype("<i8").tobytes() for row, kept in zip(tokens, mask, strict=True))
    return [hashlib.sha256(content).hexdigest()[:16] for content in contents]


def rows_of(batch: DataProto, rows: Sequence[int]) -> DataProto:
    """Return a new batch of the rows `rows` of `batch`, with its meta information."""
    from verl import DataProto

    columns = {name: values[np.asarray(rows)] for name, values in batch.non_tensor_batch.items()}
    return DataProto(batch.batch[torch.as_tensor(rows)], columns, batch.meta_info)


def _places(order: Sequence[int], answers: int) -> list[int]:
    """Return the rows of the answers to each prompt, in the order of prompts; each has `answers` consecutive rows.

    With prompts sent as 2 0 1 and two answers each, prompt 0 was second, so the rows are 2 3 4 5 0 1.
    """
    place = np.empty(len(order), dtype=np.int64)
    place[np.asarray(order)] = np.arange(len(order))
    return (place[:, None] * answers + np.arange(answers)).reshape(-1).tolist()
