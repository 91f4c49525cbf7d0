"""The generation counter of this process's rollout weights."""

from post_training.process_context import process_context
from post_training.reshard.generation import WeightsGeneration


def process_generation() -> WeightsGeneration:
    """Return the generation counter of this process, which has one rollout model."""
    return process_context().of(WeightsGeneration)
