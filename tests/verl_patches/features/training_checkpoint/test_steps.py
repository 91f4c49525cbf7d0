"""The driver's side of a checkpoint: what a kill leaves at any write, what is taken up again, and what is refused."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from post_training.checkpoint.durable import hash_file
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.manifest import Manifest
from verl_patches.features.data_order.order import DataOrderError
from verl_patches.features.training_checkpoint import trainer as saving
from verl_patches.features.training_checkpoint.run_records import take_back_steps
from verl_patches.features.training_checkpoint.step_folders import newest_step, read_trainer, step_folder
from verl_patches.features.training_checkpoint.trainer import process_publisher, resume_step, save_step


class Workers:
    """A worker group that writes one file, and remembers what it was told to load."""

    def save_checkpoint(self, folder, hdfs_path, step):
        file = Path(folder, "rank-00000-of-00001.safetensors")
        file.parent.mkdir()
        file.write_text(f"state of step {step}")
        Manifest({}, files={file.name: hash_file(file, lambda _: None)}, complete=True).write(file.parent)

    def load_checkpoint(self, folder, del_local_after_load):
        assert not del_local_after_load
        self.loaded = Path(folder, "rank-00000-of-00001.safetensors").read_text()


class Loader:
    """A loader whose place is the number of the step."""

    place = None

    def state_dict(self):
        return {"epoch": 0, "position": self.place}

    def load_state_dict(self, state):
        if state["position"] is None:
            raise DataOrderError("no place")
        self.place = state["position"]


@pytest.fixture
def trainer(tmp_path):
    """verl's trainer, as far as it saves and resumes, in a run with one data file."""
    data = tmp_path / "train.parquet"
    data.write_text("rows")

    def at(step=0, **options):
        keys = {"default_local_dir": str(tmp_path / "checkpoints"), "resume_mode": "auto", "resume_from_path": None}
        config = {"trainer": keys | options, "data": {"train_files": [str(data)]}}
        made = SimpleNamespace(config=OmegaConf.create(config), global_steps=step, actor_rollout_wg=Workers())
        made.train_dataloader, made.root, made.data = Loader(), Path(keys["default_local_dir"]), data
        made.train_dataloader.place = step
        return made

    return at


def saved(trainer, step, **options):
    made = trainer(step, **options)
    save_step(made)
    process_publisher().logged(step)
    return made


def test_a_run_goes_on_where_it_was_saved(trainer):
    saved(trainer, 2)
    root = saved(trainer, 4).root
    made = trainer()
    resume_step(made, "")
    assert (made.global_steps, made.train_dataloader.place) == (4, 4)
    assert made.actor_rollout_wg.loaded == "state of step 4"
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "4"
    made = trainer(resume_mode="resume_path", resume_from_path=str(step_folder(root, 2)))
    resume_step(made, "")
    assert made.global_steps == 2
    made = trainer(resume_mode="disable")
    resume_step(made, "")
    assert made.global_steps == 0 and not hasattr(made.actor_rollout_wg, "loaded")


def test_without_a_checkpoint_training_begins(trainer, capsys):
    made = trainer()
    resume_step(made, "")
    assert made.global_steps == 0 and "training begins at step 1" in capsys.readouterr().out


def test_a_step_has_its_name_only_after_its_metrics_are_logged(trainer):
    made = trainer(3)
    save_step(made)
    process_publisher().logged(2)
    assert newest_step(made.root) == (None, [])
    process_publisher().logged(3)
    assert newest_step(made.root) == (3, [])


class Killed(BaseException):
    """A SIGKILL: nothing of the process's own runs after it."""


def killed_at(monkeypatch, count):
    """The process ends before its operation number `count` that changes a folder. Returns how many there were."""
    done = [0]

    def before(module, name):
        operation = getattr(module, name)

        def counting(*arguments, **options):
            done[0] += 1
            if done[0] >= count:
                raise Killed
            return operation(*arguments, **options)

        monkeypatch.setattr(module, name, counting)

    for module, name in ((os, "rename"), (os, "write"), (os, "fsync"), (os, "unlink"), (os, "mkdir"), (os, "rmdir")):
        before(module, name)
    return done


def test_a_kill_at_any_write_or_rename_leaves_a_whole_checkpoint(trainer, monkeypatch, tmp_path):
    """Step 4 is saved over step 2, keeping one. Every time the newest one is whole, and the next save succeeds."""
    root, template = saved(trainer, 2).root, tmp_path / "template"
    shutil.copytree(root, template)
    found, count = set(), 0
    while True:
        count += 1
        shutil.rmtree(root)
        shutil.copytree(template, root)
        with monkeypatch.context() as patches:
            done = killed_at(patches, count)
            try:
                saved(trainer, 4, max_actor_ckpt_to_keep=1)
            except Killed:
                pass
            else:
                break
        step, skipped = newest_step(root)
        assert skipped == [] and (step_folder(root, step) / "actor").is_dir() and read_trainer(step_folder(root, step))
        found.add(step)
        made = trainer()
        resume_step(made, "")
        assert made.actor_rollout_wg.loaded == f"state of step {made.global_steps}"
        assert newest_step(saved(trainer, 6, max_actor_ckpt_to_keep=1).root) == (6, [])
    assert found == {2, 4} and done[0] == count - 1 > 20
    assert sorted(folder.name for folder in root.iterdir() if folder.is_dir()) == ["global_step_4"]


def test_a_save_that_begins_with_its_final_name_is_noticed(trainer, monkeypatch, tmp_path):
    monkeypatch.setattr("verl_patches.features.training_checkpoint.step_folders._partial", step_folder)
    monkeypatch.setattr(saving, "publish_step", lambda root, step, keep: None)
    with pytest.raises(AssertionError, match="not a complete checkpoint"):
        test_a_kill_at_any_write_or_rename_leaves_a_whole_checkpoint(trainer, monkeypatch, tmp_path)


def test_only_the_newest_are_kept_and_never_fewer_than_asked_for(trainer):
    for step in (1, 2, 3, 4):
        root = saved(trainer, step, max_actor_ckpt_to_keep=2).root
        kept = sorted(int(folder.name.split("_")[-1]) for folder in root.glob("global_step_*"))
        assert kept == [number for number in (step - 1, step) if number]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "not a complete checkpoint"),
        (lambda folder: (folder / "actor" / "manifest.json").unlink(), "not a complete checkpoint"),
        (lambda folder: (folder / "trainer.json").write_text("{}"), "trainer.json: has SHA-256"),
        (lambda folder: next((folder / "actor").glob("rank*")).write_text("cut"), "missing, or not of 15 bytes"),
        (lambda folder: next((folder / "actor").glob("rank*")).unlink(), "missing, or not of 15 bytes"),
    ],
)
def test_auto_takes_an_older_one_and_says_what_it_skips(trainer, damage, sentence, capsys):
    saved(trainer, 2)
    root = saved(trainer, 4).root
    damage(step_folder(root, 4))
    made = trainer()
    resume_step(made, "")
    assert made.global_steps == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("skipped: ")]
    assert sentence in line
    made = trainer(resume_mode="resume_path", resume_from_path=str(step_folder(root, 4)))
    with pytest.raises(CheckpointError, match=sentence):
        resume_step(made, "")
    assert made.global_steps == 0 and not hasattr(made.actor_rollout_wg, "loaded")


def test_other_data_and_a_folder_that_is_none_are_refused(trainer, tmp_path):
    root = saved(trainer, 2).root
    made = trainer()
    made.data.write_text("other rows")
    with pytest.raises(CheckpointError, match="was trained on other data than data.train_files="):
        resume_step(made, "")
    made = trainer(resume_mode="resume_path", resume_from_path=str(root))
    with pytest.raises(CheckpointError, match="no folder of a checkpoint, which is called global_step_"):
        resume_step(made, "")


def test_a_folder_that_takes_nothing_is_named(trainer, tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"default_local_dir=.*checkpoints does not take a checkpoint \("):
        save_step(trainer(1))


def test_the_kl_coefficient_goes_on_too(trainer):
    made = trainer(2)
    made.kl_ctrl_in_reward = SimpleNamespace(value=0.25)
    save_step(made)
    process_publisher().logged(2)
    made = trainer()
    made.kl_ctrl_in_reward = SimpleNamespace(value=0.001)
    resume_step(made, "")
    assert made.kl_ctrl_in_reward.value == 0.25


def test_records_of_steps_that_are_trained_again_are_taken_back(trainer, tmp_path):
    lines = [json.dumps({"step": step, "metrics": {}}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "met')
    (tmp_path / "faults.jsonl").write_text('{"step": null}\n{"step": 3}\n')
    saved(trainer, 2)
    resume_step(trainer(), str(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:2]
    assert (tmp_path / "faults.jsonl").read_text().splitlines() == ['{"step": null}']
    take_back_steps("", 2)


def test_nothing_that_is_saved_is_a_pickle(trainer):
    root = saved(trainer, 2).root
    assert {file.name for file in root.rglob("*") if file.is_file()} == {
        "trainer.json", "manifest.json", "rank-00000-of-00001.safetensors", "latest_checkpointed_iteration.txt"
    }  # fmt: skip
    assert saving.trainer_state(trainer(2)) == json.loads((step_folder(root, 2) / "trainer.json").read_text())
