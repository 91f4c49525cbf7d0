"""Decode steps of a modelled rollout against a plain simulation and small cases by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from post_training.plan.step_time import rollout
from post_training.plan.step_time.job import Cluster
from post_training.plan.step_time.published import published_job
from post_training.plan.step_time.rollout import decode_moments

JOB = replace(
    published_job("random"),
    sequences=64,
    rollout_tp=1,
    rollout_ep=8,
    longest=100,
    prompt_tokens=0.0,
    response_tokens=50.0,
)


@settings(max_examples=30)
@given(st.floats(0.02, 0.98))
def test_lengths_have_the_mean_that_was_asked_for(mean):
    lengths = rollout._quantiles((np.arange(20000) + 0.5) / 20000, mean)
    assert lengths.min() >= 0 and lengths.max() <= 1
    assert lengths.mean() == pytest.approx(mean, abs=1e-3)


def test_answers_of_one_length_fill_one_graph_to_the_end():
    moments = decode_moments(replace(JOB, response_tokens=100.0, graph_sizes=(8, 64)), Cluster(8))
    assert {moment.slots for moment in moments} == {8}
    assert sum(moment.steps for moment in moments) == pytest.approx(100)
    # 8 sequences of a rank, whose cache grows from 0 to 100 tokens.
    assert sum(moment.steps * moment.cached_tokens for moment in moments) == pytest.approx(8 * 100 * 100 / 2)


def test_more_sequences_than_places_follow_one_another():
    moments = decode_moments(replace(JOB, response_tokens=100.0, engine_sequences=4), Cluster(8))
    assert sum(moment.steps for moment in moments) == pytest.approx(200)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 5))
def test_places_are_taken_as_a_plain_queue_takes_them(lengths, slots):
    starts = rollout._starts(np.array([lengths], dtype=float), slots)[0]
    waiting, running, step, found = list(enumerate(lengths)), {}, 0, {}
    while waiting or running:
        running = {index: left for index, left in running.items() if left}
        while waiting and len(running) < slots:
            index, length = waiting.pop(0)
            running[index], found[index] = length, step
        running = {index: left - 1 for index, left in running.items()}
        step += 1
    assert starts.tolist() == [found[index] for index in range(len(lengths))]


def test_smaller_graphs_and_rebalancing_need_fewer_slots():
    def slots(**changes):
        moments = decode_moments(replace(JOB, **changes), Cluster(8))
        return sum(moment.steps * moment.slots for moment in moments)

    one, several = slots(graph_sizes=(8,)), slots(graph_sizes=(1, 2, 4, 8))
    assert one > several > slots(graph_sizes=(1, 2, 4, 8), rebalanced=True)
