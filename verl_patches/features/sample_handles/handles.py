"""Sample references: the columns that the driver keeps and sends for a batch whose samples stay with the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from verl import DataProto

FIRST, ORDER, WIDTHS, STEP = (f"sample_handles/{name}" for name in ("first", "order", "widths", "step"))
"""Keys of meta information: the id of a generation's first sample; a batch's ids in order, the widths of its prompts
and responses, and the step that it belongs to."""
ID, LENGTHS, COUNTED = "sample_id", "sample_lengths", "sample_counted"
"""Columns of a batch: int64 [samples]; int32 [samples, 2], the numbers of tokens of prompt and response as they were
generated; int32 [samples], the number of response tokens that count now."""
REBUILT = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask", "rollout_log_probs")
REFERENCE = "ref_log_prob"
KEPT = ("old_log_probs", REFERENCE)
"""Columns that workers have computed and keep; they rebuild those in REBUILT from the tokens that they have."""
_ON_THE_DRIVER = ("token_level_scores", "token_level_rewards", "returns", "reward_baselines")

Call = Callable[[Any], Any]


class DriverOfHandles:
    """Wraps verl's calls of the workers to send sample references.

    Args:
        put: places an object where all workers can read it.
        step: returns the number of the current training step.
    """

    def __init__(self, put: Callable[[Any], Any], step: Callable[[], int]) -> None:
        self._put, self._step = put, step
        self._next = 0

    def generating(self, generate: Call) -> Call:
        """Wrap verl's call for answers: those to train on get ids, and the workers keep them too.

        verl marks prompts for validation, and those that are answered greedily for a baseline, in their meta
        information; their answers are not kept, because nothing trains on them.
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
        """Wrap verl's call for log-probs to send references."""
        return lambda batch: compute(self.handles(batch))

    def updating(self, update: Call) -> Call:
        """Wrap verl's call for an update to send references and the columns that the driver has computed."""
        return lambda batch: update(self.handles(batch, computed_columns(batch)))

    def handles(self, batch: DataProto, columns: Mapping[str, torch.Tensor | np.ndarray] | None = None) -> DataProto:
        """Return the references for a batch: ids, lengths and `columns`, [samples] each."""
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
    """Return, packed, the columns that the driver has computed for the update; workers have or rebuild the others."""
    known = {*REBUILT, *KEPT, *_ON_THE_DRIVER, ID, LENGTHS}
    width = batch.batch["responses"].size(1)
    counted = batch.batch["attention_mask"][:, -width:].bool()
    return {
        name: packed(values, counted)
        for name, values in batch.batch.items()
        if name not in known and values.shape == counted.shape
    }


def packed(values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor | np.ndarray:
    """Pack a column of token values [samples, width] without the tokens that do not count.

    Args:
        values: the column.
        counted: [samples, width], bool: which tokens count, the first ones of every row.

    Returns:
        [samples], if all values that count in a row are one number, like GRPO's advantages; otherwise an array of
        objects, [length] each.
    """
    first = values[:, 0]
    if torch.equal(torch.where(counted, values, first[:, None]), first[:, None].expand_as(values)):
        return torch.where(counted[:, 0], first, torch.zeros_like(first))
    rows = np.empty(len(values), dtype=object)
    rows[:] = [row[mask].numpy() for row, mask in zip(values, counted, strict=True)]
    return rows


def unpacked(column: torch.Tensor | np.ndarray, counted: torch.Tensor) -> torch.Tensor:
    """Restore the column [samples, width] that `packed` was given, on `counted`'s device, with 0 for other tokens."""
    if isinstance(column, torch.Tensor):
        column = column.to(counted.device)
        return torch.where(counted, column[:, None], torch.zeros_like(column)[:, None])
    values = torch.cat([torch.as_tensor(row) for row in column]).to(counted.device)
    return torch.zeros(counted.shape, dtype=values.dtype, device=counted.device).masked_scatter(counted, values)
