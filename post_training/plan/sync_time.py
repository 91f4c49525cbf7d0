"""Estimates the seconds of a weight sync from the plan's bytes, and lists published syncs for comparison."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from post_training.reshard.statistics import PlanStatistics

SLOWEST, FASTEST = 2.2e9, 16e9
"""Bytes per second and die. The slowest moves the 24.95 GB that a die of the recipe's first job receives in that job's
11.18 s; the fastest is assumed."""


@dataclass(frozen=True)
class PublishedSync:
    """A published sync; `seconds` are those of the fastest and the slowest run that the source names."""

    system: str
    model: str
    hardware: str
    conditions: str
    seconds: tuple[float, float]
    source: str


PUBLISHED = (
    PublishedSync(
        "the recipe, cann-recipes-train",
        "DeepSeek-V3-671B in bfloat16",
        "128 Atlas A3 cards, 256 dies",
        "same dies; TP4 PP8 EP8 to TP2 EP256 (random weights) and to 2 x TP2 EP128 (true weights)",
        (11.18, 11.5),
        "deepseek_rl_train_optimization.md, sections 1.4.2 and 1.4.1",
    ),
    PublishedSync(
        "checkpoint-engine",
        "DeepSeek-V3.1 in FP8",
        "256 H20",
        "broadcast from memory of hosts to 16 x TP16, buckets of 8 GiB, without 0.80 s for metadata",
        (11.33, 11.33),
        "README of MoonshotAI/checkpoint-engine, Benchmark",
    ),
    PublishedSync(
        "NeMo-RL, NCCL Xfer",
        "DeepSeek-V3 in bfloat16",
        "GPUs that are not named there",
        "PP16 EP16 to TP32 DP8",
        (7.65, 9.94),
        "NVIDIA-NeMo/RL, description of the draft pull request 2413",
    ),
)
UNKNOWN = (
    "the speed of HCCL's all-to-all among these dies, and how links within and between nodes share it",
    "the hand-over within a die, its copies into live parameters, and the wait for the slowest rank",
    "loading and offloading before and after, which verl does in turn",
)


@dataclass(frozen=True)
class SyncTime:
    """Modelled time of a sync.

    Attributes:
        received, sent: most bytes that a die receives, and sends.
        fastest, slowest: seconds in which the busier of these dies moves its bytes at `FASTEST` and at `SLOWEST`.
    """

    received: int
    sent: int
    fastest: float
    slowest: float


def sync_time(plan: PlanStatistics) -> SyncTime:
    """Return the time of one sync if only links take time, and a die sends and receives at once."""
    received, sent = int(plan.received.maximum), int(plan.sent.maximum)
    most = max(received, sent)
    return SyncTime(received, sent, most / FASTEST, most / SLOWEST)


def describe_sync(plan: PlanStatistics) -> str:
    """Format the modelled sync and the published ones as lines."""
    time = sync_time(plan)
    lines = [
        f"weight sync       {time.fastest:.1f} to {time.slowest:.1f} s, modelled at {FASTEST / 1e9:g} to "
        f"{SLOWEST / 1e9:g} GB/s a die",
        f"  the most a die  {time.received / 1e9:.2f} GB received, {time.sent / 1e9:.2f} GB sent",
        "",
        "published",
    ]
    for row in PUBLISHED:
        least, most = (f"{seconds:g}" for seconds in row.seconds)
        lines.append(
            f"  {least if least == most else f'{least} to {most}'} s  {row.system}: {row.model}, {row.hardware}"
        )
        lines.append(f"      {row.conditions}; {row.source}")
    return "\n".join(
        [*lines, "", *(f"not known: {each}" for each in UNKNOWN), "no other stage is modelled for this stack"]
    )


def sync_estimates(plan: PlanStatistics) -> dict[str, Any]:
    """Return the modelled sync and the published ones for programs."""
    return {**asdict(sync_time(plan)), "published": [asdict(row) for row in PUBLISHED], "unknown": list(UNKNOWN)}
