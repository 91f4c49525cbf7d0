"""A replay expects zeros in a mask where verl trains nothing, and no zero elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.stack_2026.verl.test_jobs import ONE_CARD
from verl_plugin.jobs import compose_job
from verl_plugin.step_record.folder import Column, RecordedStep
from verl_plugin.step_record.worker import Replay

KEYS = ["prompt0_0_0", "prompt0_1_0", "padding_0_0"]
LENGTHS = (4, 2, 1)
TOOLS = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
REJECTS = "algorithm.rollout_correction.rollout_rs=token_k1"


def masks(*rows: list[int], padding: list[str], overrides: tuple[str, ...] = ()) -> list[Any]:
    """Replay the mask of a step whose last sample fills the batch."""
    columns = {
        "responses": Column([torch.full((length,), 7) for length in LENGTHS], True),
        "response_mask": Column([torch.tensor(row) for row in rows], True),
    }
    record = RecordedStep(3, KEYS, columns, {}, {}, compose_job(ONE_CARD), 1, padding=padding)
    return Replay(record, None, overrides, 1e-4)._mask()


@pytest.mark.parametrize(
    ("answer", "last", "padding", "apart"),
    [
        ([1, 1], [0], KEYS[2:], 0),
        ([1, 0], [0], KEYS[2:], 1),
        ([1, 1], [1], KEYS[2:], 1),
        ([1, 1], [0], [], 1),
    ],
)
def test_tokens_of_answers_are_trained_and_those_of_padding_are_not(answer, last, padding, apart):
    (found,) = masks([1, 1, 1, 1], answer, last, padding=padding)
    assert found.apart == apart


@pytest.mark.parametrize("override", [TOOLS, REJECTS])
def test_masks_with_other_zeros_are_not_compared(override):
    assert masks([1, 0, 0, 1], [1, 1], [0], padding=[], overrides=(override,)) == []
