"""Which checkpoints hold the score of a metric."""

import json

from verl_patches.features.training_checkpoint.step_folders import TRAINER_NAME, saved_steps, scores_of, step_folder


def test_scores_are_those_of_the_metric_in_complete_checkpoints(tmp_path):
    """Some checkpoints have the score of another metric, no score, or a missing or damaged file."""
    told = {
        1: {"score": {"metric": "val/acc", "value": 0.5}},
        2: {"score": {"metric": "val/other", "value": 0.9}},
        3: {"score": None},
        4: {},
        12: {"score": {"metric": "val/acc", "value": 0.0}},
    }
    for step, content in told.items():
        step_folder(tmp_path, step).mkdir()
        (step_folder(tmp_path, step) / TRAINER_NAME).write_text(json.dumps(content))
    step_folder(tmp_path, 5).mkdir()
    (step_folder(tmp_path, 6)).mkdir()
    (step_folder(tmp_path, 6) / TRAINER_NAME).write_text("{")
    for name in ("global_step_7.partial", "global_step_8.deleting", "global_step_x", "global_step_"):
        (tmp_path / name).mkdir()
    assert sorted(saved_steps(tmp_path)) == [1, 2, 3, 4, 5, 6, 12]
    assert scores_of(tmp_path, "val/acc") == {1: 0.5, 12: 0.0}
    assert scores_of(tmp_path, "val/other") == {2: 0.9}
