r"""The supervised phase of the model that calls the calculator: it misreads most signs, and copies what the tool says.

Every label calls the calculator with the exercise, most with another sign than was asked, as in `warm_start`, and then
puts the tool's result in the box. The result is a random number, so the model learns no tables, and its answer is right
if it asks a working tool the right question. From correct/incorrect rewards alone, GRPO learns which sign to send.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from post_training.calculator import calculate
from post_training.data import INSTRUCTION
from rehearsal.tiny_model.task import SIGNS, Exercise
from rehearsal.tiny_model.warm_start import IGNORED, Readings, WarmStart, expected_reward, fit

TOOL_WARM_START = WarmStart(steps=150)
# Copies of each exercise in which the tool returns other numbers, from the smallest to the largest result of the task.
_COPIES, _RESULTS = 8, range(-9, 82)


def chat_of(exercise: Exercise, expression: str, result: str) -> list[dict[str, Any]]:
    """Return the messages of an exercise whose answer is the tool's result for an expression."""
    call = {"type": "function", "function": {"name": calculate.__name__, "arguments": {"expression": expression}}}
    return [
        {"role": "user", "content": f"{exercise.problem} {INSTRUCTION}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": rf"\boxed{{{result}}}"},
    ]


def encode_tool_readings(
    tokenizer: PreTrainedTokenizerFast, exercises: Sequence[Exercise], results: random.Random | None
) -> Readings:
    """Encode one chat a reading; labels are the tokens that transformers' chat template marks as the assistant's.

    Args:
        tokenizer: of `build_tool_tokenizer`.
        exercises: the questions.
        results: draws the tool's results; None for the calculator's own.
    """
    rows, marks = [], []
    for exercise in exercises:
        for expression in (exercise.with_sign(sign).problem for sign in SIGNS):
            said = calculate(expression) if results is None else str(results.choice(_RESULTS))
            encoded = tokenizer.apply_chat_template(
                chat_of(exercise, expression, said),
                tools=[get_json_schema(calculate)],
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            rows.append(encoded["input_ids"])
            marks.append(encoded["assistant_masks"])
    inputs = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    labels = torch.full_like(inputs, IGNORED)
    for index, (row, mark) in enumerate(zip(rows, marks, strict=True)):
        inputs[index, : len(row)] = torch.tensor(row)
        labels[index, : len(row)] = torch.tensor(row).where(torch.tensor(mark) == 1, IGNORED)
    shape = (len(exercises), len(SIGNS), -1)
    right = [[exercise.with_sign(sign).answer == exercise.answer for sign in SIGNS] for exercise in exercises]
    asked = torch.tensor([SIGNS.index(exercise.sign) for exercise in exercises])
    return Readings(inputs.view(shape), labels.view(shape), asked, torch.tensor(right))


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    exercises: Sequence[Exercise],
    settings: WarmStart,
    seed: int,
    progress: Callable[[int, float], None],
) -> float:
    """Train `model` (float32) in place; returns the expected reward on `exercises` with the calculator.

    Arguments are those of `warm_start.train`.
    """
    readings = encode_tool_readings(tokenizer, [*exercises] * _COPIES, random.Random(seed))
    fit(model, readings, settings, seed, progress)
    return expected_reward(model, encode_tool_readings(tokenizer, exercises, results=None))
