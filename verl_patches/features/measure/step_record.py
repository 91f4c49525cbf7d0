"""Metrics that one process gathers during a training step, and their reduction over the ranks.

Every rank adds to its own `StepRecord`; at the end of the step `agreed` takes the largest value of each metric over the
ranks, so that whichever rank verl reads metrics from reports the slowest die and the fullest one.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256

import torch
import torch.distributed as dist

from post_training.process_context import process_context
from post_training.report.run_error import RunError

_FIRST, _LAST = "start/first/", "start/last/"
_FAR_AHEAD = 2.0**33  # Unix seconds, in the year 2242


class MetricsDifferError(RunError):
    """Ranks have metrics of different names; the message is one sentence."""


@dataclass
class LogProbDifference:
    """|rollout log-prob - training log-prob| over the response tokens seen so far."""

    largest: float = 0.0
    total: float = 0.0
    tokens: int = 0

    def add(self, rollout: torch.Tensor, training: torch.Tensor, mask: torch.Tensor) -> None:
        """Take in one micro batch; the tensors are [batch, response length], `mask` marks the response's tokens."""
        difference = (rollout.float() - training.detach().float()).abs()[mask.bool()]
        if difference.numel():
            total = difference.sum().item()
            # A sum propagates NaN by arithmetic; for a maximum only torch documents that, not the device.
            self.largest = _larger(self.largest, difference.max().item() if total == total else math.nan)
            self.total += total
            self.tokens += difference.numel()


def _larger(first: float, second: float) -> float:
    """The larger of two metrics; NaN counts as largest."""
    return first if first != first or first >= second else second


@dataclass
class StepRecord:
    """Metrics of one step in one process.

    Attributes:
        seconds: by stage.
        peak_bytes, allocated_bytes: device memory by phase.
        counts: any other non-negative metric, by name.
        starts: Unix seconds at which stages began, by stage.
        difference: of log-probs between rollout and training.
        kept_probability: probability of the part of the vocabulary that tokens were drawn from, summed over
            `drawn_tokens`.
        drawn_tokens: tokens that were drawn from a part of the vocabulary.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    allocated_bytes: dict[str, int] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    difference: LogProbDifference = field(default_factory=LogProbDifference)
    kept_probability: float = 0.0
    drawn_tokens: int = 0

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the seconds of this context to `stage`, from an idle device to an idle device."""
        torch.npu.synchronize()
        begin = time.perf_counter()
        try:
            yield
        finally:
            torch.npu.synchronize()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begin

    def memory(self, phase: str, peak: int, allocated: int) -> None:
        """Keep the largest peak of `phase`, and the largest amount allocated at its end, in bytes."""
        self.peak_bytes[phase] = max(peak, self.peak_bytes.get(phase, 0))
        self.allocated_bytes[phase] = max(allocated, self.allocated_bytes.get(phase, 0))

    def count(self, name: str, amount: float = 1) -> None:
        """Add `amount` to the metric `name`."""
        self.counts[name] = self.counts.get(name, 0) + amount

    def drew(self, kept_probability: float, tokens: int) -> None:
        """Add tokens that were drawn from a part of the vocabulary, and the sum of that part's probabilities."""
        self.kept_probability += kept_probability
        self.drawn_tokens += tokens

    def began(self, stage: str) -> None:
        """Record that the stage begins now, unless it has begun in this step already."""
        self.starts.setdefault(stage, time.time())

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name."""
        metrics: dict[str, float] = {f"timing_s/{stage}": value for stage, value in self.seconds.items()}
        metrics |= {f"memory/peak_bytes/{phase}": value for phase, value in self.peak_bytes.items()}
        metrics |= {f"memory/allocated_bytes/{phase}": value for phase, value in self.allocated_bytes.items()}
        metrics |= self.counts
        metrics["training/rollout_logprob_diff_max"] = self.difference.largest
        return metrics


def agreed(record: StepRecord, group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Return `record.metrics()` with the largest value over the ranks of `group`, plus means and skews.

    The means are those of the log-prob difference and, if tokens were drawn from a part of the vocabulary, of that
    part's probability. A skew is the seconds between the first and the last rank's start of a stage, by the clocks of
    their nodes.

    Collective: three all-reduces on the device. All ranks must have the same names, which `largest_over_ranks` checks.
    """
    # The reduction takes maxima: the largest distance to a moment far ahead gives the first start.
    last = {f"{_LAST}{stage}": start for stage, start in record.starts.items()}
    first = {f"{_FIRST}{stage}": _FAR_AHEAD - start for stage, start in record.starts.items()}
    metrics = largest_over_ranks(record.metrics() | last | first, group)
    for stage in record.starts:
        metrics[f"timing_start_skew/{stage}"] = metrics.pop(_LAST + stage) - (_FAR_AHEAD - metrics.pop(_FIRST + stage))
    means = (record.difference.total, record.difference.tokens, record.kept_probability, record.drawn_tokens)
    sums = torch.tensor(means, dtype=torch.float32, device="npu")
    dist.all_reduce(sums, group=group)
    total, tokens, kept, drawn = sums.tolist()
    if drawn:
        metrics["rollout/kept_probability"] = kept / drawn
    if tokens:
        metrics["training/rollout_logprob_diff_mean"] = total / tokens
    else:
        del metrics["training/rollout_logprob_diff_max"]
    return metrics


def largest_over_ranks(metrics: Mapping[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Return the largest value of every metric over the ranks; NaN counts as largest. Values must not be negative.

    Collective: two all-reduces, the first of which finds ranks with other names, so that no two metrics are mixed.

    The bit pattern of a non-negative IEEE double, read as int64, grows with its value, so one integer maximum serves
    byte counts and seconds alike without losing digits; devices reduce int64 but not double.

    Raises:
        MetricsDifferError: the ranks have metrics of different names; raised on every rank.
        ValueError: a value is negative.
    """
    names = sorted(metrics)
    agree_on_names(names, group)
    values = torch.tensor([float(metrics[name]) for name in names], dtype=torch.float64)
    if (values < 0).any():
        raise ValueError(f"negative metric among {dict(metrics)}")
    # 0 * inf and inf - inf are NaN with the sign bit set on x86, which would be the smallest integer of all.
    values[values.isnan()] = math.nan
    bits = values.view(torch.int64).npu()
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(names, bits.cpu().view(torch.float64).tolist(), strict=True))


def agree_on_names(names: Sequence[str], group: dist.ProcessGroup | None = None) -> None:
    """Compare the names of metrics over the ranks before anything is reduced in their order.

    Collective: one all-reduce of a digest; where digests differ, an object collective names the difference.

    Raises:
        MetricsDifferError: the names differ; raised on every rank.
    """
    # 63 bits, so that the digest and its negative are both an int64: the largest and the smallest in one reduction.
    digest = int.from_bytes(sha256(json.dumps(names).encode()).digest()[:8], "big") >> 1
    bounds = torch.tensor([digest, -digest], dtype=torch.int64).npu()
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    largest, negative_smallest = bounds.tolist()
    if largest == -negative_smallest:
        return
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, list(names), group=group)
    raise MetricsDifferError(
        f"ranks measured different metrics in one step: {_difference(gathered)}. Use the same code and settings on "
        "every node; scripts/doctor.py --ray ADDRESS compares them"
    )


def _difference(gathered: Sequence[Sequence[str]]) -> str:
    """Describe how the first rank with other names than rank 0 differs from it."""
    first = set(gathered[0])
    rank, theirs = next((rank, set(found)) for rank, found in enumerate(gathered) if set(found) != first)
    parts = [f"lacks {', '.join(sorted(first - theirs)[:3])}"] * bool(first - theirs)
    parts += [f"alone has {', '.join(sorted(theirs - first)[:3])}"] * bool(theirs - first)
    return f"compared with rank 0, rank {rank} {' and '.join(parts)}"


def current_record() -> StepRecord:
    """Return the record of the current step in this process."""
    return process_context().of(StepRecord)


def finish_step(group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """End the step: agree on its metrics over the ranks and begin an empty record. Collective, see `agreed`."""
    return agreed(process_context().take(StepRecord), group)
