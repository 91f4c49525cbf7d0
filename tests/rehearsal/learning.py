"""A rehearsal long enough to show whether the policy learns, and the rise of its reward."""

import json
from pathlib import Path
from statistics import mean

from tests.rehearsal.command import rehearse

STEPS = 12
# With an unchanged policy, the mean of three steps (768 answers) varies by about 0.03.
NOISE = 0.12


def learn(output: Path, *overrides: str, steps: int = STEPS) -> list[dict[str, float]]:
    """Run a rehearsal with seed 1, and return the metrics of every step."""
    rehearse(output, "--steps", str(steps), "--seed", "1", "--", *overrides)
    metrics = [json.loads(line)["metrics"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == steps
    return metrics


def rise(steps: list[dict[str, float]]) -> float:
    """Return the mean reward of the last three steps minus that of the first three."""
    rewards = [step["critic/score/mean"] for step in steps]
    return mean(rewards[-3:]) - mean(rewards[:3])
