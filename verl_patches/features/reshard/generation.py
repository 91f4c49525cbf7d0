"""The counter of rollout weights of this process."""

from post_training.reshard.generation import WeightsGeneration
from verl_patches.features.worker_context import worker_context


def process_generation() -> WeightsGeneration:
    """The one counter of this process, which has one rollout model."""
    return worker_context().of(WeightsGeneration)
