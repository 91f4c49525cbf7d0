"""The supervised phase asks for the right tokens, learns, and measures the reward that sampling would give."""

import pytest
import torch
from torch.nn import functional
from transformers import DeepseekV3ForCausalLM

from verl_patches.features.dataset import Problem
from verl_patches.features.tiny_model import warm_start
from verl_patches.features.tiny_model.architecture import tiny_config
from verl_patches.features.tiny_model.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
PROBLEMS = [Problem("3+4", "7"), Problem("6*7", "42"), Problem("9-9", "0")]


@pytest.fixture
def model() -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)
    config = tiny_config(0, 1, 2)
    config.n_routed_experts, config.num_hidden_layers = 32, 2
    return DeepseekV3ForCausalLM(config)


def test_labels_are_the_response_and_the_end_and_nothing_else():
    examples = warm_start.encode_examples(TOKENIZER, PROBLEMS, ["7", "42", "0"])
    asked = [labels[labels != -100].tolist() for labels in examples.labels]
    assert [TOKENIZER.decode(row) for row in asked] == ["7<|end|>", "42<|end|>", "0<|end|>"]
    for row, labels in zip(examples.inputs, examples.labels, strict=True):
        assert torch.equal(row[labels != -100], labels[labels != -100])


def test_the_learning_rate_rises_and_falls():
    settings = warm_start.WarmStart(steps=100, ramp_steps=10, learning_rate=1.0)
    rates = [settings.learning_rate_at(step) for step in range(100)]
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert peak == 9 and rates[-1] < 0.06


def test_expected_reward_is_the_product_of_the_tokens_probabilities(model):
    examples = warm_start.boxed_examples(TOKENIZER, PROBLEMS)
    naive = []
    for row, labels in zip(examples.inputs, examples.labels, strict=True):
        probabilities = functional.softmax(model(input_ids=row[None]).logits[0].double(), dim=-1)
        positions = (labels != -100).nonzero().flatten()
        naive.append(torch.stack([probabilities[place - 1, row[place]] for place in positions]).prod())
    assert warm_start.expected_reward(model, examples) == pytest.approx(torch.stack(naive).mean().item(), rel=1e-3)


def trained_reward(model: DeepseekV3ForCausalLM, boxed_share: float) -> float:
    settings = warm_start.WarmStart(steps=80, batch_size=16, boxed_share=boxed_share)
    losses = []
    reward = warm_start.train(model, TOKENIZER, PROBLEMS, settings, 0, lambda step, loss: losses.append((step, loss)))
    assert [step for step, _ in losses] == list(range(1, 81))
    assert losses[-1][1] < losses[0][1] / 2
    return reward


def test_training_on_boxed_labels_gives_the_full_reward(model):
    assert trained_reward(model, boxed_share=1.0) > 0.9


def test_training_on_bare_labels_gives_none(model):
    assert trained_reward(model, boxed_share=0.0) < 0.01


def test_a_share_of_boxed_labels_gives_about_that_reward(model):
    assert 0.2 < trained_reward(model, boxed_share=0.5) < 0.8
