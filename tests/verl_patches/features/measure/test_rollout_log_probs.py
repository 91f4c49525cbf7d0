"""The log-probs that an engine sampled with, taken from what it returns."""

from types import SimpleNamespace

import pytest
import torch

from verl_patches.features.measure.rollout_log_probs import PADDING, log_probs_of, observed_outputs
from verl_patches.workers.rollout.vllm_rollout.vllm_rollout_spmd import generate_sequences_with_log_probs


def sample(*chosen: tuple[int, float]):
    """A sample of these tokens; at every place vLLM also returns the likeliest token."""
    at = [{token: SimpleNamespace(logprob=value), 99: SimpleNamespace(logprob=-0.01)} for token, value in chosen]
    return SimpleNamespace(token_ids=[token for token, _ in chosen], logprobs=at)


REQUESTS = [
    SimpleNamespace(outputs=[sample((5, -0.5), (6, -1.5)), sample((7, -2.0))]),
    SimpleNamespace(outputs=[sample((8, -0.25), (5, -3.0), (2, -4.0)), sample((2, -1.25))]),
]
EXPECTED = [[-0.5, -1.5, PADDING], [-2.0, PADDING, PADDING], [-0.25, -3.0, -4.0], [-1.25, PADDING, PADDING]]


class Engine:
    def generate(self, prompts):
        return REQUESTS[prompts : prompts + 1]


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


def generated(of_upstream: dict) -> dict:
    """The tensors of a batch that upstream's rollout generates as `of_upstream`, with the patch around it."""
    rollout = SimpleNamespace(inference_engine=Engine())

    def upstream(self, prompts):
        for prompt in prompts:
            self.inference_engine.generate(prompt)
        return SimpleNamespace(batch={"responses": torch.zeros(4, 3, dtype=torch.long)} | of_upstream)

    return generate_sequences_with_log_probs(upstream, rollout, [0, 1]).batch


def test_a_rollout_that_drops_them_returns_them():
    assert generated({})["rollout_log_probs"].tolist() == EXPECTED


def test_a_rollout_that_returns_them_is_left_alone():
    own = torch.ones(4, 3)
    assert generated({"rollout_log_probs": own})["rollout_log_probs"] is own
