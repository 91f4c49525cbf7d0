"""scripts/replay.py: the folder of the model that the ranks load."""

from types import SimpleNamespace

import pytest

from scripts import replay

KEY = "actor_rollout_ref.model.path"


@pytest.mark.parametrize(
    ("recorded", "change", "expected"),
    [
        ("/models/qwen", [], "/models/qwen"),
        ("/models/qwen", ["--set", f"{KEY}=copy"], "{here}/copy"),
        ("/models/qwen", ["--set", f"{KEY}=my copy"], "{here}/my copy"),
        ("models/qwen", [], f"{replay.ROOT}/models/qwen"),
    ],
)
def test_ranks_load_the_model_that_was_checked(tmp_path, monkeypatch, recorded, change, expected):
    """They start in another folder: a path of the run counts from the checkout, one of the user from the user's."""
    monkeypatch.chdir(tmp_path)
    config = {"actor_rollout_ref": {"model": {"path": recorded}, "rollout": {"dtype": "float32"}}}
    record, options = SimpleNamespace(config=config, dies=1), replay.parse_arguments(["step_3", *change])
    model = replay._model(options, record)
    assert str(model) == expected.format(here=tmp_path)
    command = replay._command(options, record, 1, tmp_path / "replay.json")
    loaded = [recorded, *(word.partition("=")[2].strip("'") for word in command if word.startswith(f"{KEY}="))][-1]
    assert loaded == str(model) and str(tmp_path / "step_3") in command
