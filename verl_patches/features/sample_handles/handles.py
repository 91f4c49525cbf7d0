"""What the driver keeps and sends of a batch whose samples are with the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from verl import DataProto

FIRST, ORDER, WIDTHS, STEP = (f"sample_handles/{name}" for name in ("first", "order", "widths", "step"))
"""Meta information: the id of a generation's first sample; a batch's ids, its columns of prompts and of responses, and
the step that it belongs to."""
ID, LENGTHS, COUNTED = "sample_id", "sample_lengths", "sample_counted"
"""Columns of a batch: int64 [samples]; int32 [samples, 2], tokens of prompt and response as they were generated; int32
[samples], tokens of the response that count now."""
REBUILT = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask", "rollout_log_probs")
REFERENCE = "ref_log_prob"
KEPT = ("old_log_probs", REFERENCE)
"""What workers compute from the tokens that they have, or have computed."""
_ON_THE_DRIVER = ("token_level_scores", "token_level_rewards", "returns", "reward_baselines")

Call = Callable[[Any], Any]


class DriverOfHandles:
    """Takes the place of verl's calls of the workers.

    put: places an object where all workers can read it. step: the number of the step that is being trained.
    """

    def __init__(self, put: Callable[[Any], Any], step: Callable[[], int]) -> None:
        self._put, self._step = put, step
        self._next = 0

    def generating(self, generate: Call) -> Call:
        """verl's call for answers: those to train on have ids, and stay with the workers too.

        verl marks prompts for validation, and those that are answered greedily for a baseline, in their meta
        information; answers to them are only looked at.
        """

        def call(prompts: DataProto) -> DataProto:
            if prompts.meta_info.get("validate") or not prompts.meta_info.get("do_sample", True):
                return generate(prompts)
            prompts.meta_info[FIRST] = self._next
            answers = generate(prompts)
            answers.meta_info.pop(FIRST, None)
            width = answers.batch["responses"].size(1)
            attention = answers.batch["attention_mask"]
            lengths = torch.stack((attention[:, :-width].sum(-1), attention[:, -width:].sum(-1)), dim=-1)
            answers.batch[ID] = torch.arange(self._next, self._next + len(answers))
            answers.batch[LENGTHS] = lengths.to(torch.int32)
            self._next += len(answers)
            return answers

        return call

    def asking(self, compute: Call) -> Call:
        """verl's call for log-probs."""
        return lambda batch: compute(self.handles(batch))

    def updating(self, update: Call) -> Call:
        """verl's call for an update, with the columns that the driver has computed."""
        return lambda batch: update(self.handles(batch, computed_columns(batch)))

    def handles(self, batch: DataProto, columns: Mapping[str, torch.Tensor | np.ndarray] | None = None) -> DataProto:
        """What stands for a batch: ids, lengths and `columns`, [samples] each."""
        from verl import DataProto

        responses, attention = batch.batch["responses"], batch.batch["attention_mask"]
        width, ids = responses.size(1), batch.batch[ID]
        counted = attention[:, -width:].sum(-1).to(torch.int32)
        tensors = {ID: ids, LENGTHS: batch.batch[LENGTHS], COUNTED: counted}
        ragged: dict[str, np.ndarray] = {}
        for name, values in (columns or {}).items():
            (tensors if isinstance(values, torch.Tensor) else ragged)[name] = values
        widths = attention.size(1) - width, width
        meta = {**batch.meta_info, ORDER: self._put(ids.numpy()), WIDTHS: widths, STEP: self._step()}
        return DataProto.from_dict(tensors, ragged, meta_info=meta)


def computed_columns(batch: DataProto) -> dict[str, torch.Tensor | np.ndarray]:
    """What the driver has computed for the update, as `packed` gives it; not what workers have or rebuild."""
    known = {*REBUILT, *KEPT, *_ON_THE_DRIVER, ID, LENGTHS}
    width = batch.batch["responses"].size(1)
    counted = batch.batch["attention_mask"][:, -width:].bool()
    return {
        name: packed(values, counted)
        for name, values in batch.batch.items()
        if name not in known and values.shape == counted.shape
    }


def packed(values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor | np.ndarray:
    """A column of token values [samples, width] without what does not count.

    counted: [samples, width], bool: which tokens count, the first ones of every row. Where all that count in a row are
    one number, as advantages of GRPO are, that is all: [samples]. Otherwise an array of objects, [length] each.
    """
    first = values[:, 0]
    if torch.equal(torch.where(counted, values, first[:, None]), first[:, None].expand_as(values)):
        return torch.where(counted[:, 0], first, torch.zeros_like(first))
    rows = np.empty(len(values), dtype=object)
    rows[:] = [row[mask].numpy() for row, mask in zip(values, counted, strict=True)]
    return rows


def unpacked(column: torch.Tensor | np.ndarray, counted: torch.Tensor) -> torch.Tensor:
    """The column [samples, width] that `packed` was given, on the device of `counted`, and 0 where nothing counts."""
    if isinstance(column, torch.Tensor):
        column = column.to(counted.device)
        return torch.where(counted, column[:, None], torch.zeros_like(column)[:, None])
    values = torch.cat([torch.as_tensor(row) for row in column]).to(counted.device)
    return torch.zeros(counted.shape, dtype=values.dtype, device=counted.device).masked_scatter(counted, values)
