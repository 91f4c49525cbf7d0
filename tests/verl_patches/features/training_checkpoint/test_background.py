"""Writing while training continues: the same file, no extra memory, and the reason for waiting before the update."""

import ctypes
import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch_npu  # noqa: F401

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.safetensors_files import read_header
from post_training.checkpoint.training_files import read_whole
from verl_patches.features.measure import step_record
from verl_patches.features.residency.feature import ResidencySettings
from verl_patches.features.residency.phases import Residency
from verl_patches.features.residency.storages import StorageGroup
from verl_patches.features.settings import OverlaySettings
from verl_patches.features.training_checkpoint import saving
from verl_patches.features.training_checkpoint.background import GROUPS, BackgroundWriter
from verl_patches.features.training_checkpoint.feature import CheckpointSettings, writes_in_background
from verl_patches.features.training_checkpoint.saving import RankFile, save_training

ELEMENTS = 1 << 16


@pytest.fixture(autouse=True)
def alone(monkeypatch, own_context):
    """Let a single rank agree with itself."""

    def agree(problem, value=None):
        if problem:
            raise CheckpointError(problem)
        return [value]

    monkeypatch.setattr(saving, "agree", agree)


def training(elements=ELEMENTS):
    """Return a rank after an update: weights that are views of a flat buffer, an average, and a host tensor."""
    flat, average, host = torch.randn(2 * elements).npu(), torch.randn(elements).npu(), torch.arange(5.0)
    residency = Residency(lambda: True)
    residency.register("actor_params", StorageGroup(lambda: [flat]))
    residency.register("optimizer", StorageGroup(lambda: [average]))
    residency.enter("update")
    residency.enter("checkpoint")
    views = {
        "master/a[0:1]": flat[elements:],
        "exp_avg/a[0:1]": average.view(-1, 8).t(),
        "weight/b[0:1]": flat[3:7].view(2, 2),
        "random/host": host,
    }
    return SimpleNamespace(residency=residency, flat=flat, average=average, host=host, tensors=views)


def file_of(made, folder):
    return RankFile(folder, "rank-00000-of-00001.safetensors", True, made.tensors, {"optimizer_steps": "2"})


@pytest.fixture
def held(monkeypatch):
    """Block all writing until the event is set."""
    event, write = threading.Event(), saving.write_file

    def waiting(*arguments):
        assert event.wait(60)
        return write(*arguments)

    monkeypatch.setattr(saving, "write_file", waiting)
    yield event
    event.set()


def begun(made, folder):
    writer = BackgroundWriter()
    writer.begin(file_of(made, folder), made.residency.copy_out(GROUPS["actor"]))
    return writer


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_files_are_those_of_a_save_at_once(tmp_path, held):
    """Between the save and the next update memory is offloaded, as in any step, and other tensors use the device's."""
    made = training()
    writer = begun(made, tmp_path / "background")
    for phase in ("reshard", "rollout"):
        made.residency.enter(phase)
    assert made.flat.untyped_storage().nbytes() == 0
    assert not (tmp_path / "background").exists()
    held.set()
    writer.finish()
    made.residency.enter("checkpoint")
    save_training(file_of(made, tmp_path / "at once"))
    assert contents(tmp_path / "background") == contents(tmp_path / "at once")


def test_an_update_that_does_not_wait_is_in_the_file(tmp_path, held):
    """The control of the test above: memory is not copied, so it must not change until it has been written."""
    made = training()
    before = made.average.cpu().clone()
    writer = begun(made, tmp_path)
    made.residency.enter("update")
    made.average.add_(1)
    made.residency.enter("reshard")
    held.set()
    writer.finish()
    stored = read_header(tmp_path / "rank-00000-of-00001.safetensors")["exp_avg/a[0:1]"]
    assert torch.equal(read_whole(stored).t().reshape(-1), before + 1)


def test_what_is_copied_at_a_save_is_not_copied_again_when_it_leaves(tmp_path):
    made = training()
    record, size = step_record.current_record(), 12 * ELEMENTS
    made.residency.copy_out(GROUPS["actor"])
    made.residency.enter("reshard")
    made.residency.enter("rollout")
    assert record.counts["residency/device_to_host_bytes"] == size
    made.residency.enter("update")
    made.residency.enter("reshard")
    made.residency.enter("rollout")
    assert record.counts["residency/device_to_host_bytes"] == 2 * size


def most_memory_while(action):
    """Return the largest rise of this process's memory during `action`, in bytes."""

    def status(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(key)).split()[1]) << 10

    # Return freed memory to the system; otherwise `action` could reuse it without a visible rise.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def test_no_host_memory_is_taken(tmp_path, monkeypatch):
    """The state has 48 MB, a third of it strided; a writer that copied it would take as much again."""
    made = training(elements=4 << 20)
    made.residency.copy_out(GROUPS["actor"])  # all host copies exist, as from the first step on

    def save(writer):
        writer.begin(file_of(made, tmp_path), made.residency.copy_out(GROUPS["actor"]))
        writer.finish()

    save(BackgroundWriter())
    assert most_memory_while(lambda: save(BackgroundWriter())) < 20 << 20
    monkeypatch.setattr(StorageGroup, "host_copy", lambda self, tensor: None)
    assert most_memory_while(lambda: save(BackgroundWriter())) > 28 << 20


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), MemoryError("none left")])
def test_writer_failure_reported_when_awaited(tmp_path, monkeypatch, error):
    def fails(*arguments):
        raise error

    with monkeypatch.context() as patches:
        patches.setattr(saving, "write_file", fails)
        writer = begun(made := training(), tmp_path)
        with pytest.raises(CheckpointError, match="rank-00000-of-00001.safetensors: cannot be written") as told:
            writer.finish()
    assert "\n" not in str(told.value) and list(tmp_path.iterdir()) == []
    writer.finish()  # nothing is being written
    writer.begin(file_of(made, tmp_path), made.residency.copy_out(GROUPS["actor"]))
    writer.finish()
    assert (tmp_path / "manifest.json").is_file()


def test_a_rank_that_has_nothing_to_write_says_why(tmp_path):
    writer, made = BackgroundWriter(), training()
    file = RankFile(tmp_path, "rank", True, {}, {}, "different numbers of updates")
    writer.begin(file, made.residency.copy_out(GROUPS["actor"]))
    with pytest.raises(CheckpointError, match="different numbers of updates"):
        writer.finish()


@pytest.mark.parametrize(
    ("write", "resident", "expected"),
    [("auto", True, True), ("auto", False, False), ("at_once", True, False), ("at_once", False, False)],
)
def test_workers_write_in_the_background_where_the_host_has_the_state_anyway(write, resident, expected):
    chosen = OverlaySettings(checkpoint=CheckpointSettings(write=write), residency=ResidencySettings(enabled=resident))
    assert writes_in_background(chosen) is expected
