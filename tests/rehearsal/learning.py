"""A rehearsal that is long enough to show whether the policy learns, and how far its reward rose."""

import json
from pathlib import Path
from statistics import mean

from tests.rehearsal.command import rehearse

STEPS = 12
# The mean of three steps (768 answers) varies by about 0.03 while the policy stays the same.
NOISE = 0.12


def learn(output: Path, *overrides: str, steps: int = STEPS) -> list[dict[str, float]]:
    """Rehearse with seed 1; return the metrics of every step."""
    rehearse(output, "--steps", str(steps), "--seed", "1", "--", *overrides)
    metrics = [json.loads(line)["metrics"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == steps
    return metrics


def rise(steps: list[dict[str, float]]) -> float:
    """Mean reward of the last three steps above that of the first three."""
    rewards = [step["critic/score/mean"] for step in steps]
    return mean(rewards[-3:]) - mean(rewards[:3])
