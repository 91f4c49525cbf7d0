"""The counter of rollout weights of this process."""

from post_training.process_context import process_context
from post_training.reshard.generation import WeightsGeneration


def process_generation() -> WeightsGeneration:
    """The one counter of this process, which has one rollout model."""
    return process_context().of(WeightsGeneration)
