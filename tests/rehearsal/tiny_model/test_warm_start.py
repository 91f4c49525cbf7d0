"""The supervised phase trains on the right tokens, learns, and measures the reward that sampling would give."""

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from rehearsal.tiny_model import warm_start
from rehearsal.tiny_model.architecture import tiny_config
from rehearsal.tiny_model.task import SIGNS, Exercise
from rehearsal.tiny_model.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
EXERCISES = [Exercise(3, "+", 4), Exercise(6, "*", 7), Exercise(2, "*", 2)]


@pytest.fixture(params=["deepseek_v3", "qwen2", "qwen3_moe"])
def model(request) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_config(0, 1, 2, request.param)
    config.n_routed_experts = config.num_experts = 32
    config.num_hidden_layers = 2
    return AutoModelForCausalLM.from_config(config)


def test_labels_are_the_readings_and_the_end_and_nothing_else():
    readings = warm_start.encode_readings(TOKENIZER, EXERCISES)
    asked = [TOKENIZER.decode(labels[labels != -100]) for labels in readings.labels.flatten(0, 1)]
    assert asked == [exercise.with_sign(sign).solution + "<|end|>" for exercise in EXERCISES for sign in SIGNS]
    given = readings.labels != -100
    assert torch.equal(readings.inputs[given], readings.labels[given])


def test_labels_follow_verls_prompt():
    readings = warm_start.encode_readings(TOKENIZER, EXERCISES)
    for exercise, inputs, labels in zip(EXERCISES, readings.inputs, readings.labels, strict=True):
        question = [{"role": "user", "content": f"{exercise.problem} {warm_start.INSTRUCTION}"}]
        prompt = TOKENIZER.apply_chat_template(question, add_generation_prompt=True)
        for row, asked in zip(inputs.tolist(), labels.tolist(), strict=True):
            begin = next(place for place, label in enumerate(asked) if label != -100)
            assert row[:begin] == prompt


def test_readings_know_what_was_asked_and_which_answers_are_right():
    readings = warm_start.encode_readings(TOKENIZER, EXERCISES)
    assert [SIGNS[index] for index in readings.asked] == ["+", "*", "*"]
    assert readings.right.tolist() == [[True, False, False], [False, False, True], [True, False, True]]


def test_the_learning_rate_rises_and_falls():
    settings = warm_start.WarmStart(steps=100, ramp_steps=10, learning_rate=1.0)
    rates = [settings.learning_rate_at(step) for step in range(100)]
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert peak == 9 and rates[-1] < 0.06


def test_expected_reward_sums_the_probabilities_of_right_readings(model):
    naive = torch.zeros(len(EXERCISES))
    for index, exercise in enumerate(EXERCISES):
        question = [{"role": "user", "content": f"{exercise.problem} {warm_start.INSTRUCTION}"}]
        prompt = TOKENIZER.apply_chat_template(question, add_generation_prompt=True)
        for reading in map(exercise.with_sign, SIGNS):
            if reading.answer == exercise.answer:
                row = torch.tensor(prompt + TOKENIZER.encode(reading.solution + "<|end|>", add_special_tokens=False))
                probabilities = functional.softmax(model(input_ids=row[None]).logits[0], dim=-1)
                places = range(len(prompt), len(row))
                naive[index] += torch.stack([probabilities[place - 1, row[place]] for place in places]).prod()
    readings = warm_start.encode_readings(TOKENIZER, EXERCISES)
    assert warm_start.expected_reward(model, readings) == pytest.approx(naive.mean().item(), rel=1e-3, abs=0)


def trained_reward(model: PreTrainedModel, right_sign_share: float) -> float:
    settings = warm_start.WarmStart(steps=100, batch_size=16, right_sign_share=right_sign_share)
    losses = []
    exercises = EXERCISES[:2]
    reward = warm_start.train(model, TOKENIZER, exercises, settings, 0, lambda step, loss: losses.append((step, loss)))
    assert [step for step, _ in losses] == list(range(1, 101))
    assert losses[-1][1] < losses[0][1] / 2
    return reward


def test_right_signs_give_the_full_reward(model):
    assert trained_reward(model, right_sign_share=1.0) > 0.9


def test_wrong_signs_give_none(model):
    assert trained_reward(model, right_sign_share=0.0) < 0.02


def test_a_share_of_right_signs_gives_about_that_reward(model):
    assert 0.2 < trained_reward(model, right_sign_share=0.5) < 0.8
