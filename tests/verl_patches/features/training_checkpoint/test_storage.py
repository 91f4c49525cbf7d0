"""Before training, the checkpoint folder is checked: all nodes must see it, and it must have enough space."""

import json
from collections import namedtuple
from math import prod
from pathlib import Path

import pytest

from overlay import ConfigurationError
from post_training.models.families import table_for
from rehearsal.plan import ROOT
from verl_patches.features.training_checkpoint import storage
from verl_patches.features.training_checkpoint.feature import CheckpointSettings
from verl_patches.features.training_checkpoint.storage import check_shared, check_space, read_nonce, uses_checkpoints


def test_a_folder_that_all_nodes_see_passes_and_keeps_nothing(tmp_path):
    root = tmp_path / "checkpoints"
    check_shared(root, lambda path: {"10.0.0.1": read_nonce(path), "10.0.0.2": read_nonce(path)})
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("seen", ["nothing", "another file"])
def test_a_node_with_a_folder_of_its_own_is_named(tmp_path, seen, monkeypatch):
    monkeypatch.setattr(storage, "_APPEARS_WITHIN_S", 0.0)
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    own = tmp_path / "own disk of the second node"
    own.mkdir()

    def read(path):
        if seen == "another file":
            (own / Path(path).name).write_text("left from another run")
        return {"10.0.0.1": read_nonce(path), "10.0.0.2": read_nonce(str(own / Path(path).name))}

    with pytest.raises(ConfigurationError, match="not one folder on all nodes: 10.0.0.2 did not see") as rejection:
        check_shared(tmp_path / "checkpoints", read)
    assert "\n" not in str(rejection.value) and list((tmp_path / "checkpoints").iterdir()) == []


def test_a_file_that_appears_late_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: (tmp_path / "nonce").write_text("there"))
    assert read_nonce(str(tmp_path / "nonce")) == "there"


def test_a_folder_that_takes_no_file_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="is invalid: not writable .Not a directory.. Choose another folder"):
        check_shared(tmp_path / "file" / "checkpoints", lambda path: {})


@pytest.mark.parametrize(
    ("save_freq", "resume_mode", "used"), [(-1, "disable", False), (5, "disable", True), (-1, "auto", True)]
)
def test_a_run_without_checkpoints_is_asked_for_nothing(save_freq, resume_mode, used):
    assert uses_checkpoints({"save_freq": save_freq, "resume_mode": resume_mode}) is used


Usage = namedtuple("Usage", "free")


@pytest.fixture
def model():
    """Return the values of a config.json, and the bytes of one checkpoint."""
    values = json.loads((ROOT / "tests" / "post_training" / "plan" / "deepseek_v3_config.json").read_text())
    return values, 12 * sum(map(prod, table_for(values).shapes.values()))


@pytest.mark.parametrize(("kept", "there", "fit"), [(0, 0, 1), (2, 0, 3), (2, 2, 1), (2, 5, 1)])
def test_space_is_what_is_kept_and_the_one_being_written(tmp_path, monkeypatch, model, kept, there, fit):
    values, size = model
    for step in range(there):
        (tmp_path / f"global_step_{step}").mkdir()
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: Usage(fit * size))
    check_space(tmp_path / "not" / "yet" if not there else tmp_path, values, CheckpointSettings(keep_last=kept))
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: Usage(fit * size - 1))
    many = "s" if fit > 1 else ""
    with pytest.raises(ConfigurationError, match=rf"GB free, but {fit} checkpoint{many} of .* GB will be written"):
        check_space(tmp_path, values, CheckpointSettings(keep_last=kept))
