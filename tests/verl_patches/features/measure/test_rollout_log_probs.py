"""The log-probs with which an engine sampled are taken from the engine's output."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_patches.features.measure import step_record
from verl_patches.features.measure.rollout_log_probs import (
    PADDING,
    draws_are_narrowed,
    kept_probabilities,
    log_probs_of,
    observed_outputs,
)
from verl_patches.features.rollout_rebalance import requests
from verl_patches.features.temperature.sampled import log_prob_of_model
from verl_patches.workers.rollout.vllm_rollout.vllm_rollout_spmd import generate_sequences_with_log_probs


def reported(of_draw: float, of_model: float | None = None):
    """Return vLLM's Logprob; for a draw from part of the vocabulary, `rank` has the bits of the model's log-prob."""
    rank = 1 if of_model is None else int(np.float32(of_model).view(np.int32))
    return SimpleNamespace(logprob=of_draw, rank=rank)


def sample(*chosen: tuple[int, float]):
    """Return a sample of these tokens; like vLLM, each position also reports the likeliest token."""
    at = [{token: reported(value), 99: reported(-0.01)} for token, value in chosen]
    return SimpleNamespace(token_ids=[token for token, _ in chosen], logprobs=at)


REQUESTS = [
    SimpleNamespace(outputs=[sample((5, -0.5), (6, -1.5)), sample((7, -2.0))]),
    SimpleNamespace(outputs=[sample((8, -0.25), (5, -3.0), (2, -4.0)), sample((2, -1.25))]),
]
EXPECTED = [[-0.5, -1.5, PADDING], [-2.0, PADDING, PADDING], [-0.25, -3.0, -4.0], [-1.25, PADDING, PADDING]]


# One token drawn from 80 % of the model's probability, and one from all of it.
NARROWED = [
    SimpleNamespace(
        outputs=[
            SimpleNamespace(
                token_ids=[5, 6], logprobs=[{5: reported(math.log(0.5), math.log(0.4))}, {6: reported(-1.0, -1.0)}]
            )
        ]
    )
]


class Engine:
    requests = REQUESTS

    def generate(self, prompts):
        return self.requests[prompts : prompts + 1]


def test_samples_of_a_request_follow_each_other_and_ends_are_padded():
    found = log_probs_of(REQUESTS, length=3)
    assert found.dtype == torch.float32 and found.tolist() == EXPECTED


def test_a_response_that_does_not_fit_is_an_error():
    with pytest.raises(RuntimeError):
        log_probs_of(REQUESTS, length=2)


def test_all_calls_within_the_block_are_seen_and_the_engine_is_left_as_it_was():
    engine = Engine()
    with observed_outputs(engine) as seen:
        assert engine.generate(0) == REQUESTS[:1]
        engine.generate(1)
    assert seen == REQUESTS and not vars(engine)
    engine.generate(0)
    assert len(seen) == 2


class Prompts(list):
    meta_info: dict = {}


def generated(of_upstream: dict, requests=REQUESTS, **meta_info) -> dict:
    """Return the batch tensors of upstream's rollout, which returns `of_upstream`, with the patch around it."""
    rollout = SimpleNamespace(inference_engine=Engine())
    rollout.inference_engine.requests = requests
    prompts = Prompts(range(len(requests)))
    prompts.meta_info = meta_info

    def upstream(self, prompts):
        for prompt in prompts:
            self.inference_engine.generate(prompt)
        return SimpleNamespace(batch={"responses": torch.zeros(4, 3, dtype=torch.long)} | of_upstream)

    return generate_sequences_with_log_probs(upstream, rollout, prompts).batch


def test_a_rollout_that_drops_them_returns_them():
    assert generated({})["rollout_log_probs"].tolist() == EXPECTED


def test_a_rollout_that_returns_them_is_left_alone():
    own = torch.ones(4, 3)
    assert generated({"rollout_log_probs": own})["rollout_log_probs"] is own


def test_others_stand_in_for_the_engine_around_the_block():
    engine = Engine()
    engine.generate = stand_in = lambda prompts: REQUESTS[1:]
    with observed_outputs(engine) as seen, observed_outputs(engine) as inner:
        engine.generate(0)
    assert seen == inner == REQUESTS[1:] and engine.generate is stand_in


def test_narrowed_draws_are_compared_over_the_vocabulary():
    """verl 0.4.0 returns the log-probs of the narrowed draw."""
    own = torch.tensor([[math.log(0.5), -1.0]])
    found = generated({"rollout_log_probs": own, "responses": torch.zeros(1, 2)}, NARROWED, validate=True)
    torch.testing.assert_close(found["rollout_log_probs"], torch.tensor([[math.log(0.4), -1.0]]))
    assert draws_are_narrowed(NARROWED) and not draws_are_narrowed(REQUESTS)


def test_kept_probability_is_a_mean_over_trained_tokens(own_context):
    record = own_context.of(step_record.StepRecord)
    generated({"responses": torch.zeros(1, 2)}, NARROWED, validate=True)
    assert record.drawn_tokens == 0, "a validation is not trained on"
    generated({"responses": torch.zeros(1, 2)}, NARROWED)
    assert kept_probabilities(NARROWED) == (pytest.approx(1.8), 2)
    assert (record.kept_probability, record.drawn_tokens) == (pytest.approx(1.8), 2)


def test_both_log_probs_come_home_from_another_engine():
    moved = requests.Sampled([5], [[5]], [[-0.7]], [reported(-0.7, -1.25).rank])
    (home,) = requests.decoded(requests.encoded([requests.FinishedRequest("4", moved)]), requests.FinishedRequest)
    assert home.sampled == moved
    assert log_prob_of_model(SimpleNamespace(logprob=-0.7, rank=home.sampled.ranks[0])) == -1.25
