"""A full disk or foreign files lead to one sentence; nothing is left half-written, and nothing is unpickled."""

import builtins
import errno
import json
import os
import pickle
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from post_training.checkpoint import filling, manifest
from post_training.checkpoint.durable import hash_file
from post_training.checkpoint.files import CheckpointError
from tests.verl_patches.features.training_checkpoint.ranks import ONE, full_states, rank_of, save_all
from verl_patches.features.training_checkpoint import saving
from verl_patches.features.training_checkpoint.restoring import load_training
from verl_patches.features.training_checkpoint.saving import rank_file, save_training

pytestmark = pytest.mark.usefixtures("alone")


def trained():
    return rank_of("qwen2", ONE, 0, full_states("qwen2"))


@contextmanager
def files_of_at_most(size):
    """Limit the size of every file that this process writes; the kernel rejects further bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_system_that_takes_no_more_bytes_leaves_no_file(tmp_path):
    with (
        files_of_at_most(1 << 12),
        pytest.raises(CheckpointError, match="cannot be written .File too large.. Free space"),
    ):
        save_training(rank_file(tmp_path, trained(), {}, {}))
    assert list(tmp_path.iterdir()) == []
    save_training(rank_file(tmp_path, trained(), {}, {}))
    made = rank_of("qwen2", ONE, 0)
    load_training(tmp_path, made)
    assert not any(tensor.isnan().any() for tensor in made.tensors.values())


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, 100)])
def test_no_manifest_where_a_written_file_has_changed(tmp_path, monkeypatch, damage):
    """Another run that writes to the same folder removes files while the ranks agree on the list."""
    monkeypatch.setattr(manifest, "_SEEN_WITHIN_S", 0)
    monkeypatch.setattr(manifest, "_POLL_S", 0)
    file = rank_file(tmp_path, trained(), {}, {})
    problem, written = file.write()
    damage(tmp_path / file.name)
    with pytest.raises(CheckpointError, match="instead of the .* bytes written"):
        file.complete(problem, written)
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize(
    ("operation", "number"),
    [("write", errno.ENOSPC), ("fsync", errno.EIO), ("rename", errno.EACCES), ("mkdir", errno.EROFS)],
)
def test_failed_operation_names_file_and_leaves_no_manifest(tmp_path, monkeypatch, operation, number):
    folder = tmp_path / "actor"

    def fails(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, operation, fails)
    with pytest.raises(
        CheckpointError, match=rf"rank-00000-of-00001.*cannot be written \({os.strerror(number)}\)"
    ) as told:
        save_training(rank_file(folder, trained(), {}, {}))
    assert "\n" not in str(told.value) and not [file for file in folder.glob("*") if file.name != "nothing"]


@pytest.mark.parametrize("state", ["master", "exp_avg", "exp_avg_sq"])
def test_missing_state_reported_before_loading(tmp_path, monkeypatch, state):
    save_training(rank_file(tmp_path, trained(), {}, {}))
    opened = filling.open_training_files

    def without_one(*arguments):
        files = opened(*arguments)
        del files.sources[state].tensors["model.norm.weight"]
        return files

    monkeypatch.setattr(filling, "open_training_files", without_one)
    made = rank_of("qwen2", ONE, 0)
    with pytest.raises(CheckpointError, match=f"no file has {state} of model.norm.weight. Resume from another"):
        load_training(tmp_path, made)
    assert all(tensor.isnan().all() for tensor in made.tensors.values())


def test_unwritable_manifest_reported(tmp_path, monkeypatch):
    write = saving.Manifest.write

    def fails(self, folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving.Manifest, "write", fails)
    with pytest.raises(CheckpointError, match="manifest.json: cannot be written .No space left on device."):
        save_training(rank_file(tmp_path, trained(), {}, {}))
    monkeypatch.setattr(saving.Manifest, "write", write)
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        load_training(tmp_path, rank_of("qwen2", ONE, 0))


class Evil:
    """Unpickling it creates a file."""

    def __init__(self, mark):
        self._mark = mark

    def __reduce__(self):
        return Path.touch, (self._mark,)


def test_a_pickle_in_the_folder_is_never_opened(tmp_path, monkeypatch):
    folder, mark = tmp_path / "actor", tmp_path / "unpickled"
    folder.mkdir()
    save_all(folder, "qwen2", ONE, full_states("qwen2"))
    for name in ("optim.pt", "extra_state.pt", "rank-00001-of-00002.safetensors"):
        (folder / name).write_bytes(pickle.dumps(Evil(mark)))
    opened, open_file = [], builtins.open
    monkeypatch.setattr(
        builtins, "open", lambda file, *rest, **options: opened.append(str(file)) or open_file(file, *rest, **options)
    )
    load_training(folder, rank_of("qwen2", ONE, 0))
    assert not mark.exists() and not [file for file in opened if file.endswith(".pt")]
    pickle.loads((folder / "optim.pt").read_bytes())
    assert mark.exists()


@pytest.mark.parametrize("content", ["pickle", "torch"])
def test_a_pickle_in_place_of_a_ranks_file_rejected_and_not_opened(tmp_path, content):
    folder, mark = tmp_path / "actor", tmp_path / "unpickled"
    folder.mkdir()
    save_all(folder, "qwen2", ONE, full_states("qwen2"))
    file = next(folder.glob("*.safetensors"))
    if content == "pickle":
        file.write_bytes(pickle.dumps(Evil(mark)))
    else:
        torch.save({"weights": Evil(mark)}, file)
    manifest = json.loads((folder / "manifest.json").read_text())
    written = hash_file(file, lambda _: None)
    manifest["files"][file.name] = {"bytes": written.bytes, "sha256": written.sha256}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    made = rank_of("qwen2", ONE, 0)
    with pytest.raises(CheckpointError, match=file.name):
        load_training(folder, made)
    assert not mark.exists() and all(tensor.isnan().all() for tensor in made.tensors.values())
