"""A run whose prompts are used up is validated after its last step where verl would do so, and saved once."""

from types import SimpleNamespace

import pytest

from verl_patches.features.dynamic_sampling import ending
from verl_patches.features.dynamic_sampling.source import PromptsExhausted
from verl_patches.features.training_checkpoint.step_folders import step_folder


@pytest.fixture
def calls(monkeypatch):
    """Return the list of calls to the trainer and to the checkpoint publisher, in order."""
    found = []
    publisher = SimpleNamespace(
        finish=lambda: found.append("finish"), logged=lambda step, metrics: found.append((step, metrics))
    )
    monkeypatch.setattr(ending, "process_publisher", lambda: publisher)
    return found


def trainer(calls, folder, step, test_freq, validates=True):
    """Return a trainer whose loop has begun the step after `step`."""
    options = SimpleNamespace(test_freq=test_freq, default_local_dir=str(folder))
    return SimpleNamespace(
        global_steps=step + 1,
        config=SimpleNamespace(trainer=options),
        val_reward_fn=print if validates else None,
        _validate=lambda: calls.append("validate") or {"val": 0.5},
        _save_checkpoint=lambda: calls.append("save"),
    )


@pytest.mark.parametrize(
    ("step", "test_freq", "validates", "expected"),
    [
        (3, 2, True, True),
        (4, 2, True, False),  # verl has validated it already
        (3, 2, False, False),
        (3, -1, True, False),
        (3, 0, True, False),
        (1, 100, True, True),
        (1, 1, True, False),
    ],
)
def test_the_last_step_is_validated_where_it_was_not(calls, tmp_path, step, test_freq, validates, expected, capsys):
    ended = trainer(calls, tmp_path, step, test_freq, validates)
    ending.end_early(ended, "no prompts")
    assert ended.global_steps == step
    metrics = {"val": 0.5} if expected else {}
    assert calls == [*(["validate"] if expected else []), "finish", "save", (step, metrics)]
    printed = capsys.readouterr()
    assert printed.err == f"warning: the run ends after step {step}: no prompts\n"
    assert ("Final validation metrics: {'val': 0.5}" in printed.out) is expected


def test_a_step_that_was_saved_is_not_saved_again(calls, tmp_path):
    step_folder(tmp_path, 4).mkdir(parents=True)
    ending.end_early(trainer(calls, tmp_path, 4, -1), "no prompts")
    assert calls == ["finish"]


def test_a_run_without_a_step_has_nothing_to_keep(calls, tmp_path):
    with pytest.raises(PromptsExhausted, match="no prompts"):
        ending.end_early(trainer(calls, tmp_path, 0, -1), "no prompts")
    assert calls == []
