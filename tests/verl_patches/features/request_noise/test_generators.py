"""A request draws its own random numbers, however its prompt is cut and whatever else is in its batch."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import random_sample

from verl_patches.features.request_noise.feature import REQUEST_NOISE
from verl_patches.features.request_noise.generators import give_generators, with_noise_of_its_own

VOCABULARY, ANSWER = 50, 4
Give = Any


def sampled(prompts: Sequence[int], parts: Sequence[Sequence[int]], give: Give = give_generators) -> list[list[int]]:
    """Return the answers to prompts of these lengths; `parts` is how many tokens of each prompt each step computes.

    Draws as vLLM does: the whole batch from the device's generator if a row has no generator of its own, and each row
    that has one again from that.
    """
    torch.manual_seed(0)
    batch = SimpleNamespace(req_id_to_index={str(row): row for row in range(len(prompts))}, generators={})
    states = [
        SimpleNamespace(num_computed_tokens=0, num_tokens=prompt, generator=torch.Generator().manual_seed(row))
        for row, prompt in enumerate(prompts)
    ]
    batch.generators.update({row: state.generator for row, state in enumerate(states)})
    runner = SimpleNamespace(input_batch=batch, requests={str(row): state for row, state in enumerate(states)})
    answers: list[list[int]] = [[] for _ in prompts]
    while any(len(answer) < ANSWER for answer in answers):
        taken = [
            min(next(iter(rest[:1]), state.num_tokens), state.num_tokens - state.num_computed_tokens)
            for rest, state in zip(parts, states, strict=True)
        ]
        parts = [rest[1:] for rest in parts]
        give(runner, {str(row): number for row, number in enumerate(taken)})
        tokens = random_sample(torch.full((len(prompts), VOCABULARY), 1 / VOCABULARY), batch.generators).tolist()
        for state, answer, number, token in zip(states, answers, taken, tokens, strict=True):
            state.num_computed_tokens += number
            if state.num_computed_tokens == state.num_tokens:
                answer.append(token)
                state.num_tokens += 1
    return [answer[:ANSWER] for answer in answers]


@given(st.data())
def test_answers_do_not_depend_on_how_prompts_are_cut(data):
    prompts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    parts = [data.draw(st.lists(st.integers(1, 4), max_size=12)) for _ in prompts]
    assert sampled(prompts, parts) == sampled(prompts, [[] for _ in prompts])


def test_a_part_that_draws_would_change_the_answer():
    """A control: vLLM-Ascend leaves the generator in the batch."""
    cut, whole = [[2, 2]], [[]]
    assert sampled([5], cut) == sampled([5], whole)
    assert sampled([5], cut, give=lambda runner, scheduled: None) != sampled([5], whole)


def test_a_request_without_a_seed_gets_one_and_keeps_the_rest(monkeypatch):
    drawn = iter((3, 4))
    monkeypatch.setattr("torch.randint", lambda *sizes, device: SimpleNamespace(item=lambda: next(drawn)))
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=5)
    seeded = [with_noise_of_its_own(params) for _ in range(2)]
    assert [each.seed for each in seeded] == [3, 4] and params.seed is None
    assert {(each.temperature, each.top_p, each.max_tokens) for each in seeded} == {(0.7, 0.9, 5)}
    assert with_noise_of_its_own(SamplingParams(seed=8)).seed == 8
    assert with_noise_of_its_own(SamplingParams(temperature=0.0)).seed is None


def test_it_is_off_unless_it_is_asked_for():
    assert not REQUEST_NOISE.settings().enabled
