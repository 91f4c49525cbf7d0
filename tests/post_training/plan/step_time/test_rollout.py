"""Decode steps of a modelled rollout, compared with a plain simulation and with small hand-computed cases."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st

from post_training.plan.step_time import rollout
from post_training.plan.step_time.job import Cluster
from post_training.plan.step_time.published import published_job
from post_training.plan.step_time.rollout import answers, decode_moments

JOB = replace(
    published_job("random"),
    sequences=64,
    rollout_tp=1,
    rollout_ep=8,
    longest=100,
    prompt_tokens=0.0,
    response_tokens=50.0,
)


def lengths(job, draw=0):
    return rollout._lengths(rollout._rollout(job, Cluster(8)), draw)


@settings(max_examples=30, deadline=None)
@hypothesis_given(st.floats(0.02, 1.0), st.floats(0.0, 2.0))
def test_lengths_have_the_mean_that_was_asked_for(share, spread):
    found = lengths(replace(JOB, longest=1000, response_tokens=1000 * share, spread=spread, sequences=512))
    assert found.min() > 0 and found.max() <= 1000
    assert found.mean() == pytest.approx(1000 * share)


def test_lengths_below_the_limit_are_log_normal():
    """Log lengths have the moments of a normal distribution, with the right share of variance within a prompt."""
    job = replace(JOB, sequences=1 << 16, longest=10**9, response_tokens=1000.0, spread=0.5, alike=0.6)
    logarithms = np.log(lengths(job).reshape(-1, job.samples))
    assert logarithms.std() == pytest.approx(0.5, rel=0.03)
    assert logarithms.mean() == pytest.approx(np.log(1000) - 0.5**2 / 2, abs=0.02)
    within = logarithms.var(axis=1, ddof=1).mean()
    assert 1 - within / logarithms.var() == pytest.approx(0.6, abs=0.03)


def test_samples_of_a_prompt_share_a_rank_unless_interleaved():
    side_by_side = replace(JOB, sequences=8 * 32, samples=16, spread=1.0, alike=1.0, longest=10**9)
    assert [len(set(rank)) for rank in lengths(side_by_side).tolist()] == [2] * 8
    assert [len(set(rank)) for rank in lengths(replace(side_by_side, interleaved=True)).tolist()] == [16] * 8


def test_answers_of_one_length_fill_one_graph_to_the_end():
    moments = decode_moments(replace(JOB, response_tokens=100.0, graph_sizes=(8, 64)), Cluster(8))
    assert {moment.slots for moment in moments} == {8}
    assert sum(moment.steps for moment in moments) == pytest.approx(100)
    # A rank has 8 sequences, whose cache grows from 0 to 100 tokens.
    assert sum(moment.steps * moment.cached_tokens for moment in moments) == pytest.approx(8 * 100 * 100 / 2)


def test_more_sequences_than_places_follow_one_another():
    moments = decode_moments(replace(JOB, response_tokens=100.0, engine_sequences=4), Cluster(8))
    assert sum(moment.steps for moment in moments) == pytest.approx(200)


@settings(max_examples=50)
@hypothesis_given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 5))
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
        moments = decode_moments(replace(JOB, samples=4, **changes), Cluster(8))
        return sum(moment.steps * moment.slots for moment in moments)

    one, several = slots(graph_sizes=(8,)), slots(graph_sizes=(1, 2, 4, 8))
    assert one > several > slots(graph_sizes=(1, 2, 4, 8), rebalanced=True, rebalance_every=1)


def test_a_step_costs_the_smallest_graph_of_the_fullest_rank():
    """One rank runs 3 and then 2 sequences, the other 1, so the graphs have size 4 and then 2."""
    job = replace(JOB, sequences=8, rollout_tp=4, engine_sequences=4, graph_sizes=(2, 4))
    given_lengths = np.array([[100.0, 100.0, 50.0, 1e-9], [50.0, 1e-9, 1e-9, 1e-9]])
    with mock.patch.object(rollout, "_lengths", lambda *_: given_lengths):
        rollout._moments.cache_clear()
        large, small = decode_moments(job, Cluster(8))
    rollout._moments.cache_clear()
    assert (large.slots, large.steps, small.slots, small.steps) == (4, 50.0, 2, 50.0)
    # At first 4 of 8 rows are used; then 2 of 4, because the finished rank still runs dummy batches.
    assert (large.empty, small.empty) == (4.0, 2.0)
    # The fullest rank holds 3 sequences of 25 tokens on average, then 2 of 75.
    assert (large.cached_tokens, small.cached_tokens) == (3 * 25.0, 2 * 75.0)


def test_requests_move_no_sooner_than_the_interval():
    def steps_in_the_largest(every):
        job = replace(JOB, samples=4, graph_sizes=(1, 2, 4, 8), rebalanced=True, rebalance_every=every)
        return decode_moments(job, Cluster(8))[0].steps

    assert steps_in_the_largest(1) < steps_in_the_largest(60)


def test_numbers_of_the_answers_follow_from_the_lengths():
    found = answers(replace(JOB, response_tokens=100.0), Cluster(8))
    assert (found.at_limit, found.first_rank_ends, found.steps) == (1.0, 1.0, pytest.approx(100))
    spread = answers(replace(JOB, spread=1.0), Cluster(8))
    assert 0 < spread.at_limit < 0.5 and spread.first_rank_ends < 1
