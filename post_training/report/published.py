"""Published measurements of the recipe's step on 128 Atlas A3 cards, with the conditions of each row.

Source: cann-recipes-train, docs/llm_rl/deepseek_rl_train_optimization.md, sections 1.4.1 and 1.4.2, and the README of
llm_rl/deepseek for what changed later. "Offload etc." is what remains of the total.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from post_training.models.deepseek_v3 import PUBLISHED
from post_training.report.rates import Rates, StepStatistics

CARDS = 128
SEQUENCES = 512 * 16
DEEPSEEK_V3: Mapping[str, Any] = PUBLISHED | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}
"""The config.json of the model in the rows, without the layer for multi-token prediction."""


@dataclass(frozen=True)
class PublishedRow:
    """A row: the measured step, and the tokens per second and card that were published with it."""

    name: str
    step: int
    statistics: StepStatistics
    rates: Rates
    conditions: tuple[str, ...]


TRUE_WEIGHTS = PublishedRow(
    name="published, true",
    step=2,
    statistics=StepStatistics(
        sequences=SEQUENCES,
        prompt_tokens=77.8,
        response_tokens=1576.6,
        truncated=None,
        seconds={
            "rollout": 373.65,
            "old_log_prob": 0.0,
            "ref": 144.5,
            "reward": 5.0,
            "adv": 0.21,
            "update": 319.3,
            "reshard": 11.5,
            "rest": 5.5,
        },
        total=859.68,
    ),
    rates=Rates(rollout=271.05, training=331.6, system=123.16),
    conditions=(
        "deepscaler, responses end where the model ends them, 2 rollout instances of EP128",
        "4 layers of a stage recomputed; with 8, as the job is published since, 112 tokens a second and card at first, "
        "which would be 945 s at these lengths",
        "of the recipe's optimizations those of its sections 5.1, 6.1, 6.2 and 6.4 only",
    ),
)
RANDOM_WEIGHTS = PublishedRow(
    name="published, random",
    step=5,
    statistics=StepStatistics(
        sequences=SEQUENCES,
        prompt_tokens=75.0,
        response_tokens=3039.8,
        truncated=None,
        seconds={
            "rollout": 318.27,
            "old_log_prob": 0.0,
            "ref": 104.7,
            "reward": 13.7,
            "adv": 0.188,
            "update": 328.8,
            "reshard": 11.18,
            "rest": 24.45,
        },
        total=796.8,
    ),
    rates=Rates(rollout=686.8, training=607.2, system=250.2),
    conditions=(
        "gsm8k, ignore_eos, experts balanced by force in training and rollout, one rollout instance of EP256",
        "no layer recomputed, all optimizations of its sections 3 to 6, among them data from die to die between stages",
        "its columns add up to 801.3 s; by its seconds and lengths the rollout has 611 tokens a second and card, and "
        "the training 606, not 686.8 and 607.2",
    ),
)
ROWS = (TRUE_WEIGHTS, RANDOM_WEIGHTS)
