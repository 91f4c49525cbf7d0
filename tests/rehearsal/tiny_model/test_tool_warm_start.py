"""The supervised phase with a tool trains only on calls and answers, and learns to copy the tool's result."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from post_training.calculator import calculate
from rehearsal.tiny_model import tool_warm_start
from rehearsal.tiny_model.architecture import tiny_config
from rehearsal.tiny_model.task import SIGNS, Exercise
from rehearsal.tiny_model.tokenizer import (
    CALL_CLOSING,
    CALL_OPENING,
    PUBLISHED_ENDS,
    TURN_SEPARATORS,
    build_tool_tokenizer,
)
from rehearsal.tiny_model.warm_start import IGNORED, WarmStart, expected_reward, fit

EXERCISES = [Exercise(3, "+", 4), Exercise(6, "*", 7), Exercise(2, "*", 2)]


@pytest.fixture(params=TURN_SEPARATORS)
def family(request) -> str:
    return request.param


def test_labels_are_what_the_model_writes(family):
    tokenizer, end = build_tool_tokenizer(family), PUBLISHED_ENDS[family]
    readings = tool_warm_start.encode_tool_readings(tokenizer, EXERCISES, results=None)
    asked = [tokenizer.decode(labels[labels != IGNORED]) for labels in readings.labels.flatten(0, 1)]
    calls = [exercise.with_sign(sign).problem for exercise in EXERCISES for sign in SIGNS]
    assert asked == [rf"{CALL_OPENING}{each}{CALL_CLOSING}{end}\boxed{{{calculate(each)}}}{end}" for each in calls]
    given = readings.labels != IGNORED
    assert torch.equal(readings.inputs[given], readings.labels[given])
    assert readings.right.tolist() == [[True, False, False], [False, False, True], [True, False, True]]


def test_fixed_parts_of_a_call_are_one_token_each(family):
    tokenizer = build_tool_tokenizer(family)
    row = tokenizer.encode(f"{CALL_OPENING}7*8{CALL_CLOSING}", add_special_tokens=False)
    assert len(row) == 5 and tokenizer.decode(row, skip_special_tokens=True) == f"{CALL_OPENING}7*8{CALL_CLOSING}"


@pytest.mark.slow
def test_trained_model_copies_what_the_tool_says():
    """The model even copies a lying tool: the reward counts copies of its numbers, which a guess hits once in 91."""
    torch.manual_seed(0)
    tokenizer = build_tool_tokenizer("qwen3")
    model = AutoModelForCausalLM.from_config(tiny_config(0, 1, 2, "qwen3", num_hidden_layers=2))
    exercises = [Exercise(left, sign, right) for left in range(5, 9) for right in range(4) for sign in SIGNS]
    readings = tool_warm_start.encode_tool_readings(tokenizer, exercises * 8, random.Random(0))
    lies = tool_warm_start.encode_tool_readings(tokenizer, exercises, random.Random(1))
    assert expected_reward(model, lies) < 0.01
    fit(model, readings, WarmStart(steps=80, right_sign_share=1.0), 0, lambda step, loss: None)
    assert expected_reward(model, lies) > 0.2
