"""Fixtures for checkpoints of simulated ranks, in one process."""

import pytest

from post_training.checkpoint.files import CheckpointError
from verl_patches.features.training_checkpoint import restoring, saving


@pytest.fixture
def alone(monkeypatch):
    """Let one rank at a time agree with itself only."""

    def agree(problem, value=None):
        if problem:
            raise CheckpointError(problem)
        return [value]

    monkeypatch.setattr(restoring, "agree", agree)
    monkeypatch.setattr(saving, "agree", agree)
