"""Columns by which driver and workers exchange answers that continue: one in the prompts, two in the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from verl_patches.features.partial_rollout.engine import LEFT, Row, Share, generate

ROWS, _SHARE = "answers_begun", "answers_that_end_the_rollout"
TOKENS, FINISHED = "answer_tokens", "answer_is_finished"


def with_rows(prompts: Any, rows: Sequence[Row], share: Share) -> Any:
    """Add to `prompts`, a `DataProto`, the answers so far (one row per prompt) and the share that ends the rollout."""
    column = np.empty(len(rows), dtype=object)
    column[:] = rows
    prompts.non_tensor_batch[ROWS] = column
    prompts.meta_info[_SHARE] = share
    return prompts


def take_rows(prompts: Any) -> tuple[list[Row], Share] | None:
    """Remove and return what `with_rows` added; None for other prompts, such as those of a validation."""
    if ROWS not in prompts.non_tensor_batch:
        return None
    return list(prompts.non_tensor_batch.pop(ROWS)), prompts.meta_info.pop(_SHARE)


@contextmanager
def going_on(llm: Any, rows: Sequence[Row], share: Share) -> Iterator[list[Any]]:
    """Let verl's call of `llm.generate` continue the answers in `rows` within this context; yields its outputs."""
    seen: list[Any] = []

    def instead(prompts: Sequence[Any], sampling_params: Any, **_: Any) -> list[Any]:
        seen[:] = generate(llm, [each["prompt_token_ids"] for each in prompts], sampling_params, rows, share)
        return list(seen)

    llm.generate = instead
    try:
        yield seen
    finally:
        vars(llm).pop("generate", None)


def with_progress(generated: Any, outputs: Sequence[Any]) -> Any:
    """Add to `generated`, a `DataProto` of answers, how many tokens each has and whether it is finished (int64)."""
    answers = [answer for output in outputs for answer in output.outputs]
    device = generated.batch["responses"].device
    generated.batch[TOKENS] = torch.tensor([len(answer.token_ids) for answer in answers], device=device)
    generated.batch[FINISHED] = torch.tensor([int(answer.finish_reason != LEFT) for answer in answers], device=device)
    return generated
