"""Checkpoints of made-up ranks, in one process."""

import pytest

from post_training.checkpoint.files import CheckpointError
from verl_patches.features.training_checkpoint import restoring, saving


@pytest.fixture
def alone(monkeypatch):
    """One rank at a time, which agrees with itself."""

    def agree(problem, value=None):
        if problem:
            raise CheckpointError(problem)
        return [value]

    monkeypatch.setattr(restoring, "agree", agree)
    monkeypatch.setattr(saving, "agree", agree)
