"""Models the decode steps of a rollout: the running sequences of every rank over time, and the graphs they run in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from post_training.plan.rebalance import bucket, rebalance
from post_training.plan.step_time.job import Cluster, StepJob

_MOMENTS = 128
_DRAWS = 8
_HALVINGS = 60


@dataclass(frozen=True)
class Moment:
    """Decode steps in graphs of one size, with means over these steps.

    Attributes:
        steps: number of decode steps.
        slots: rows of the graph that all ranks run.
        cached_tokens: of the rank that has most of them.
        empty: rows without a sequence on all ranks: padding of a graph, and dummy batches of ranks that have finished.
    """

    steps: float
    slots: int
    cached_tokens: float
    empty: float


@dataclass(frozen=True)
class Answers:
    """Statistics of the lengths of a rollout's answers: means over draws.

    Attributes:
        at_limit: share of the answers that reach the limit.
        first_rank_ends: share of the decode steps after which the first rank has no answers left.
        steps: number of decode steps.
    """

    at_limit: float
    first_rank_ends: float
    steps: float


@dataclass(frozen=True)
class _Rollout:
    """The part of a job that determines its decode steps."""

    ranks: int
    sequences: int
    samples: int
    prompt_tokens: float
    response_tokens: float
    spread: float
    alike: float
    longest: int
    slots: int
    sizes: tuple[int, ...]
    every: int
    interleaved: bool


def decode_moments(job: StepJob, cluster: Cluster) -> tuple[Moment, ...]:
    """Return the decode steps of a rollout by graph size, largest first; means over draws of lengths."""
    return _moments(_rollout(job, cluster))


def answers(job: StepJob, cluster: Cluster) -> Answers:
    """Return statistics of the lengths that `decode_moments` uses."""
    rollout = _rollout(job, cluster)
    found = []
    for draw in range(_DRAWS):
        lengths = _lengths(rollout, draw)
        ends = (_starts(lengths, rollout.slots) + lengths).max(axis=1)
        # The factor comes from bisection, so a cut length may be below the limit by a rounding error.
        cut = lengths > job.longest * (1 - 1e-9)
        found.append((cut.mean(), ends.min() / ends.max(), ends.max()))
    return Answers(*(float(value) for value in np.mean(found, axis=0)))


def _rollout(job: StepJob, cluster: Cluster) -> _Rollout:
    return _Rollout(
        ranks=job.rollout_ranks(cluster),
        sequences=job.sequences,
        samples=job.samples,
        prompt_tokens=job.prompt_tokens,
        response_tokens=job.response_tokens,
        spread=job.spread,
        alike=job.alike,
        longest=job.longest,
        slots=job.engine_sequences,
        sizes=tuple(sorted({*job.graph_sizes, job.engine_sequences})),
        every=job.rebalance_every if job.rebalanced else 0,
        interleaved=job.interleaved,
    )


@lru_cache(maxsize=256)
def _moments(rollout: _Rollout) -> tuple[Moment, ...]:
    """Merge all draws: sum steps by slots, and average cached tokens and empty rows weighted by steps."""
    totals: dict[int, NDArray[np.float64]] = {}
    for draw in range(_DRAWS):
        for steps, slots, cached, empty in _draw(rollout, _lengths(rollout, draw)):
            one = np.array([steps, steps * cached, steps * empty]) / _DRAWS
            totals[slots] = totals.get(slots, np.zeros(3)) + one
    return tuple(
        Moment(float(steps), slots, float(cached / steps), float(empty / steps))
        for slots, (steps, cached, empty) in sorted(totals.items(), reverse=True)
    )


def _draw(rollout: _Rollout, lengths: NDArray[np.float64]) -> list[tuple[float, int, float, float]]:
    """Return (steps, slots, cached tokens of the fullest rank, empty rows) for 128 equal parts of a rollout.

    Unfinished sequences migrate as `rebalance` decides, every `rollout.every` steps, once all sequences have begun.
    """
    begins = _starts(lengths, rollout.slots)
    starts, ends = begins.ravel(), (begins + lengths).ravel()
    rank_of = np.repeat(np.arange(rollout.ranks), lengths.shape[1])
    total, checked, found = float(ends.max()), 0.0, []
    for index in range(_MOMENTS):
        step = (index + 0.5) / _MOMENTS * total
        running = (starts <= step) & (step < ends)
        counts = np.bincount(rank_of[running], minlength=rollout.ranks)
        if rollout.every and step // rollout.every > checked and step >= starts.max():
            checked = step // rollout.every
            for move in rebalance(counts.tolist(), rollout.sizes):
                moved = np.flatnonzero(running & (rank_of == move.source))[-move.sequences :]
                rank_of[moved] = move.target
            counts = np.bincount(rank_of[running], minlength=rollout.ranks)
        slots = bucket(int(counts.max()), rollout.sizes)
        ages = rollout.prompt_tokens + step - starts[running]
        cached = np.bincount(rank_of[running], weights=ages, minlength=rollout.ranks).max()
        found.append((total / _MOMENTS, slots, float(cached), float(rollout.ranks * slots - counts.sum())))
    return found


def _lengths(rollout: _Rollout, draw: int) -> NDArray[np.float64]:
    """Draw lengths (ranks, sequences of a rank): log-normal, cut at the limit, with exactly the requested mean.

    The samples of a prompt share a part of the deviation. verl repeats each prompt in place, so all samples of a prompt
    lie on one rank; `interleaved` repeats the whole batch instead. The same draw gives the same lengths at every call.
    """
    each = max(1, -(-rollout.sequences // rollout.ranks))
    number = rollout.ranks * each
    random = np.random.default_rng(draw)
    prompts = -(-number // rollout.samples)
    prompt = random.standard_normal((prompts, 1))
    sample = random.standard_normal((prompts, rollout.samples))
    normal = np.sqrt(rollout.alike) * prompt + np.sqrt(1 - rollout.alike) * sample
    placed = (normal.T if rollout.interleaved else normal).ravel()[:number]
    return _with_mean(rollout.spread * placed, rollout.response_tokens, rollout.longest).reshape(rollout.ranks, each)


def _with_mean(deviations: NDArray[np.float64], mean: float, longest: int) -> NDArray[np.float64]:
    """Return exp(deviation) times one factor, cut at `longest`; bisection finds the factor that gives mean `mean`."""
    low, high = -50.0, np.log(longest) - deviations.min()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        short = np.minimum(np.exp(middle + deviations), longest).mean() < mean
        low, high = (middle, high) if short else (low, middle)
    cut: NDArray[np.float64] = np.minimum(np.exp(high + deviations), longest)
    return cut


def _starts(lengths: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """Return the step in which each sequence begins.

    A rank has `slots` places, and the next sequence takes the first one that becomes free.
    """
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
