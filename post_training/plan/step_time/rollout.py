"""The rollout by decode steps: how many sequences every rank runs when, and in which graph."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import numpy as np
from numpy.typing import NDArray

from post_training.plan.rebalance import bucket
from post_training.plan.step_time.job import Cluster, StepJob

_MOMENTS = 128
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Moment:
    """Decode steps that are alike. slots: size of the graph that all ranks run. cached_tokens: of the rank that has
    most of them."""

    steps: float
    slots: int
    cached_tokens: float


def decode_moments(job: StepJob, cluster: Cluster) -> list[Moment]:
    """The decode steps of a rollout from first to last, in 128 parts."""
    ranks = job.rollout_ranks(cluster)
    lengths = _lengths(job, ranks)
    starts = _starts(lengths, job.engine_sequences)
    ends = starts + lengths
    total = float(ends.max())
    sizes = sorted({*job.graph_sizes, job.engine_sequences})
    found = []
    for index in range(_MOMENTS):
        step = (index + 0.5) / _MOMENTS * total
        running = (starts <= step) & (step < ends)
        counts = running.sum(axis=1)
        most = -(-int(counts.sum()) // ranks) if job.rebalanced else int(counts.max())
        cached = (running * (job.prompt_tokens + step - starts)).sum(axis=1)
        found.append(Moment(total / _MOMENTS, bucket(most, sizes), float(cached.max())))
    return found


def _lengths(job: StepJob, ranks: int) -> NDArray[np.float64]:
    """(ranks, sequences of a rank): exponential with the job's mean, cut at its longest, the same at every call."""
    each = max(1, -(-job.sequences // ranks))
    place = (np.arange(ranks * each) * _GOLDEN + 0.5) % 1.0
    return _quantiles(place, job.response_tokens / job.longest).reshape(ranks, each) * job.longest


def _quantiles(place: NDArray[np.float64], mean: float) -> NDArray[np.float64]:
    """Of the exponential distribution on [0, 1] with this mean; with 0.5 it is the uniform one."""
    if mean >= 0.999:
        return np.ones_like(place)
    low, high = -1000.0, 1000.0
    for _ in range(100):
        rate = (low + high) / 2
        low, high = (rate, high) if _mean(rate) > mean else (low, rate)
    if abs(rate) < 1e-6:
        return place
    # From 1, or from 0, whichever keeps the exponential small.
    if rate < 0:
        return 1 + np.log(1 - (1 - place) * -np.expm1(rate)) / -rate
    return -np.log(1 - place * -np.expm1(-rate)) / rate


def _mean(rate: float) -> float:
    """Of density ~ exp(-rate x) on [0, 1]."""
    if abs(rate) < 1e-6:
        return 0.5
    return 1 - _mean(-rate) if rate < 0 else 1 / rate - exp(-rate) / -np.expm1(-rate)


def _starts(lengths: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """When each sequence begins: a rank has `slots` places, and the next sequence takes the one that is free first."""
    ranks, each = lengths.shape
    starts = np.zeros_like(lengths)
    if each <= slots:
        return starts
    free, every = np.zeros((ranks, slots)), np.arange(ranks)
    for index in range(each):
        place = free.argmin(axis=1)
        starts[:, index] = free[every, place]
        free[every, place] += lengths[:, index]
    return starts
