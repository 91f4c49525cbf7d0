"""A run resumed from its checkpoint equals the unbroken one: Ray, two dies and verl's own loop.

tests/worker_processes checks that a checkpoint of several pipeline stages resumes exactly.

Two epochs of two steps: the checkpoint is at the end of the first epoch, so the order of the second is tested too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile

import pyarrow.parquet
import pytest

from tests.shared_training import command_of
from tests.verl_patches.trainer.test_run import TWO_DIES, command, records

pytestmark = pytest.mark.slow
# Metrics that depend on a clock or on the history of a process's memory.
MEASURED = ("timing", "perf/", "memory/", "residency/")


def trained(inputs, folder, data, *overrides):
    """Run four steps, saving every second one, and check that no file is left outside the run's folder."""
    line, environment, _ = command(
        (inputs[0], data),
        folder,
        "trainer.total_training_steps=4",
        "trainer.total_epochs=2",
        "trainer.save_freq=2",
        f"trainer.default_local_dir={folder}/checkpoints",
        "actor_rollout_ref.actor.optim.warmup_style=cosine",
        *TWO_DIES,
        *overrides,
    )
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as temporary:
        environment["TMPDIR"] = temporary
        line = command_of(line[3:], environment)
        ended = subprocess.run(line, env=environment, cwd=folder, capture_output=True, text=True, timeout=900)
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
        assert os.listdir(temporary) == []
    return ended.stdout


def comparable(folder):
    """Return every metric of every step, except measurements of time and memory."""
    return {
        record["step"]: {name: v for name, v in record["metrics"].items() if not name.startswith(MEASURED)}
        for record in records(folder / "metrics.jsonl")
    }


def digests(folder, step):
    """Return the SHA-256 of all files of the ranks: weights, optimizer and random states."""
    manifest = json.loads((folder / "checkpoints" / f"global_step_{step}" / "actor" / "manifest.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items()}


@pytest.fixture(scope="module")
def data(inputs, tmp_path_factory):
    """Return a file of 16 problems, which are two batches."""
    file = tmp_path_factory.mktemp("data") / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(inputs[1]).slice(0, 16), file)
    return file


@pytest.fixture(scope="module")
def unbroken(inputs, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    trained(inputs, folder, data)
    return folder


@pytest.fixture(scope="module")
def resumed(inputs, data, unbroken, tmp_path_factory):
    """Return the run's folder, resumed from the state that a kill in step 4 leaves, and the resumed run's output."""
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copytree(unbroken, folder, dirs_exist_ok=True)
    checkpoints = folder / "checkpoints"
    (checkpoints / "global_step_4").rename(checkpoints / "global_step_4.partial")
    said = trained(inputs, folder, data, "trainer.resume_mode=auto")
    return folder, said


def test_every_metric_of_every_later_step_is_the_unbroken_runs(unbroken, resumed):
    expected, found = comparable(unbroken), comparable(resumed[0])
    assert list(found) == [1, 2, 3, 4]
    for step in (3, 4):
        assert found[step] == expected[step]
        assert {"actor/lr", "actor/grad_norm", "critic/score/mean", "training/epoch"} <= set(found[step])
    assert [found[step]["training/epoch"] for step in found] == [0, 0, 1, 1]
    assert "resuming after step 2" in resumed[1]


def test_weights_optimizer_and_random_numbers_end_the_same_to_the_bit(unbroken, resumed):
    assert digests(resumed[0], 4) == digests(unbroken, 4) != digests(unbroken, 2)
    assert len(digests(unbroken, 4)) == 2
    left = {each.name for each in (resumed[0] / "checkpoints").iterdir() if not each.name.startswith(".run.owner")}
    assert left == {"global_step_2", "global_step_4", "latest_checkpointed_iteration.txt"}


def test_a_run_that_is_over_trains_nothing_more(inputs, data, resumed):
    before = (resumed[0] / "metrics.jsonl").read_text()
    trained(inputs, resumed[0], data, "trainer.resume_mode=auto")
    assert (resumed[0] / "metrics.jsonl").read_text() == before
