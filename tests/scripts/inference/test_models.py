"""Which folders are accepted as a model."""

import pytest

from scripts.inference import models


def test_run_stands_for_its_newest_complete_checkpoint(tmp_path, monkeypatch):
    """Whether a checkpoint is complete is tested with the trainings' checkpoints, in features/training_checkpoint."""
    monkeypatch.setattr(models, "newest_step", lambda root: (2, ["global_step_10: not complete"]))
    run = tmp_path / "run"
    for step in (2, 10):
        (run / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    newest = run / "checkpoints" / "global_step_2"
    assert models.newest_checkpoint(run) == models.newest_checkpoint(run / "checkpoints") == newest
    assert models.newest_checkpoint(newest) == newest
    monkeypatch.undo()
    with pytest.raises(models.InferenceError, match="no checkpoint is complete: .*global_step_10"):
        models.newest_checkpoint(run)
