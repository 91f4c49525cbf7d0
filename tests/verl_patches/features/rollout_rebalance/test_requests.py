"""A migrated request takes along what its next engine needs, and its home engine gets back the sampled tokens."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from verl_patches.features.rollout_rebalance.requests import (
    FinishedRequest,
    MovingRequest,
    Sampled,
    arriving_request,
    decoded,
    encoded,
    joined,
    output_of,
    parameters_left,
    require_movable,
)

unhurried = settings(max_examples=50)
token = st.integers(0, 2**31 - 1)
log_prob = st.floats(width=32, allow_nan=False)


@st.composite
def outputs(draw: st.DrawFn) -> EngineCoreOutput:
    tokens = draw(st.lists(token, min_size=1, max_size=3))
    rows = st.lists(log_prob, min_size=2, max_size=2)
    log_probs = LogprobsLists(
        [[each, draw(token)] for each in tokens], [draw(rows) for _ in tokens], [draw(token) for _ in tokens]
    )
    return EngineCoreOutput("7@0", tokens, draw(st.just(log_probs) | st.none()))


@st.composite
def moving_requests(draw: st.DrawFn) -> MovingRequest:
    sampled = joined(draw(st.lists(outputs(), max_size=4)))
    random_numbers = draw(st.none() | st.binary(max_size=40))
    tokens = draw(st.lists(token, max_size=9))
    return MovingRequest(draw(token), draw(st.text()), tokens, draw(st.binary()), draw(token), random_numbers, sampled)


@unhurried
@given(st.lists(moving_requests(), max_size=3))
def test_moved_requests_arrive_unchanged(requests):
    assert decoded(encoded(requests), MovingRequest) == requests


@unhurried
@given(st.lists(outputs(), min_size=1, max_size=6), st.integers(0, 6), st.sampled_from(FinishReason))
def test_outputs_of_two_engines_come_home_as_those_of_one(steps, cut, reason):
    steps[-1].finish_reason, steps[-1].stop_reason = reason, 5
    before = joined(steps[: min(cut, len(steps) - 1)])
    sampled = joined(steps[min(cut, len(steps) - 1) :], before)
    (finished,) = decoded(encoded([FinishedRequest("7", sampled)]), FinishedRequest)
    found = output_of(finished)
    assert found.request_id == "7" and found.finished
    assert found.new_token_ids == [each for step in steps for each in step.new_token_ids]
    rows = [row for step in steps if step.new_logprobs for row in zip(*step.new_logprobs, strict=True)]
    assert list(zip(*(found.new_logprobs or ([], [], [])), strict=True)) == rows
    assert (found.finish_reason, found.stop_reason) == (reason, 5)


def running_request(params: SamplingParams, generated: list[int]) -> Request:
    request = Request("4", [1, 2, 3], None, None, None, params, eos_token_id=9)
    request.append_output_token_ids(generated)
    return request


def test_an_engine_that_takes_over_goes_on_from_the_tokens_with_what_is_left():
    given = SamplingParams(
        n=4, temperature=0.7, top_k=5, max_tokens=20, min_tokens=3, seed=11, stop_token_ids=[8], logprobs=2
    )
    request = running_request(given, [6, 7])
    moving = MovingRequest(0, "4", [*request.all_token_ids], parameters_left(request), 9, b"", Sampled([], [], [], []))
    arrived = Request.from_engine_core_request(arriving_request(moving, "4@0"))
    assert arrived.prompt_token_ids == [1, 2, 3, 6, 7] and arrived.num_output_tokens == 0
    assert (arrived.request_id, arrived.eos_token_id, arrived.max_tokens) == ("4@0", 9, 18)
    params = arrived.sampling_params
    assert (params.n, params.min_tokens, params.seed) == (1, 1, 11)
    assert (params.temperature, params.top_k, params.logprobs) == (0.7, 5, 2)
    assert params.stop_token_ids == [8] and params.all_stop_token_ids == {8}
    assert given.max_tokens == 20, "the request's own parameters were changed"


@pytest.mark.parametrize(("done", "left"), [(1, 2), (3, 0), (5, 0)])
def test_what_is_left_of_the_least_number_of_tokens_is_never_below_none(done, left):
    request = running_request(SamplingParams(min_tokens=3, max_tokens=20), [6] * done)
    params = msgspec.msgpack.decode(parameters_left(request), type=SamplingParams)
    assert (params.min_tokens, params.max_tokens) == (left, 20 - done)


@pytest.mark.parametrize(
    ("field", "value"),
    [("repetition_penalty", 1.1), ("presence_penalty", 0.5), ("prompt_logprobs", 1), ("stop", ["end"])],
)
def test_a_parameter_that_looks_at_where_a_request_began_rejected(field, value):
    params = SamplingParams(temperature=0.0, **{field: value})
    with pytest.raises(ValueError, match=rf"enabled=true cannot be combined with the sampling parameter {field}="):
        require_movable(params, "enabled")
    require_movable(SamplingParams(temperature=0.7, top_p=0.9, seed=3), "enabled")
