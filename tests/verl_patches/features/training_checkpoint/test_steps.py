"""The driver's side of a checkpoint: what a kill at any write leaves, what a run resumes from, what is rejected."""

import errno
import json
import os
import random
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from omegaconf import OmegaConf

from post_training.checkpoint import manifest
from post_training.checkpoint.durable import hash_file
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.manifest import Manifest
from post_training.report.metrics import read_entries, read_records
from verl_patches.features.data_order.order import DataOrderError
from verl_patches.features.measure import run_files
from verl_patches.features.training_checkpoint import circumstances
from verl_patches.features.training_checkpoint import trainer as saving
from verl_patches.features.training_checkpoint.feature import CheckpointSettings, KeepBest
from verl_patches.features.training_checkpoint.kept_states import process_kept_states
from verl_patches.features.training_checkpoint.run_records import take_back_steps
from verl_patches.features.training_checkpoint.step_folders import newest_step, read_trainer, step_folder
from verl_patches.features.training_checkpoint.trainer import (
    kept_in_checkpoint,
    process_publisher,
    resume_step,
    save_step,
)


class Workers:
    """A worker group that writes one file, and records what it was told to load."""

    def save_checkpoint(self, folder, hdfs_path, step):
        file = Path(folder, "rank-00000-of-00001.safetensors")
        file.parent.mkdir()
        file.write_text(f"state of step {step}")
        Manifest({}, files={file.name: hash_file(file, lambda _: None)}, complete=True).write(file.parent)

    def load_checkpoint(self, folder, del_local_after_load):
        assert not del_local_after_load
        self.loaded = Path(folder, "rank-00000-of-00001.safetensors").read_text()


class SlowWorkers(Workers):
    """Workers that write only when they are asked to finish."""

    writing = None

    def save_checkpoint(self, *arguments):
        assert self.writing is None
        self.writing = arguments

    def finish_checkpoint(self):
        (arguments, self.writing) = (self.writing, None)
        super().save_checkpoint(*arguments)


class Loader:
    """A loader whose place is the step number."""

    place = None

    def state_dict(self):
        return {"epoch": 0, "position": self.place}

    def load_state_dict(self, state):
        if state["position"] is None:
            raise DataOrderError("no place")
        self.place = state["position"]


@pytest.fixture
def trainer(tmp_path):
    """Return a function that makes the part of verl's trainer that saves and resumes, with one data file."""
    data = tmp_path / "train.parquet"
    data.write_text("rows")

    def at(step=0, of_data=None, **options):
        keys = {"default_local_dir": str(tmp_path / "checkpoints"), "resume_mode": "auto", "resume_from_path": None}
        config = {"trainer": keys | options, "data": {"train_files": [str(data)]} | (of_data or {})}
        made = SimpleNamespace(config=OmegaConf.create(config), global_steps=step, actor_rollout_wg=Workers())
        made.train_dataloader, made.root, made.data = Loader(), Path(keys["default_local_dir"]), data
        made.train_dataloader.place = step
        return made

    return at


def saved(trainer, step, keep=None, metrics=None, in_background=False, **options):
    made = begun(trainer, step, keep, metrics, in_background, **options)
    process_publisher().finish()
    return made


def begun(trainer, step, keep=None, metrics=None, in_background=True, **options):
    """Save and log a step; background writing has not finished yet."""
    made = trainer(step, **options)
    if in_background:
        made.actor_rollout_wg = SlowWorkers()
    save_step(made, keep or CheckpointSettings(), in_background)
    process_publisher().logged(step, metrics or {})
    return made


def kept(root):
    """Return the steps that have a checkpoint."""
    return sorted(int(folder.name.split("_")[-1]) for folder in root.glob("global_step_*") if "." not in folder.name)


@pytest.fixture
def with_critic(trainer):
    """Return a function that makes such a trainer with a critic."""

    def at(*arguments, **options):
        made = trainer(*arguments, **options)
        made.use_critic, made.critic_wg = True, Workers()
        return made

    return at


def test_critic_continues_with_the_actor(with_critic):
    root = saved(with_critic, 3).root
    made = with_critic()
    resume_step(made, "")
    assert made.critic_wg.loaded == made.actor_rollout_wg.loaded == "state of step 3"
    assert sorted(each.name for each in step_folder(root, 3).iterdir() if each.is_dir()) == ["actor", "critic"]


def test_a_checkpoint_whose_critic_is_not_whole_is_passed_over(with_critic, capsys):
    saved(with_critic, 2)
    root = saved(with_critic, 4).root
    next((step_folder(root, 4) / "critic").glob("rank-*")).unlink()
    made = with_critic()
    resume_step(made, "")
    assert made.global_steps == 2 and "global_step_4/critic" in capsys.readouterr().out


def test_a_checkpoint_without_a_critic_rejected_where_there_is_one(trainer, with_critic):
    saved(trainer, 2)
    made = with_critic()
    with pytest.raises(CheckpointError, match="was written without a critic, but algorithm.adv_estimator=gae"):
        resume_step(made, "")
    assert not hasattr(made.actor_rollout_wg, "loaded") and made.train_dataloader.place == 0


def test_run_continues_from_its_checkpoint(trainer):
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


@pytest.mark.parametrize(("step", "val_only", "validates"), [(0, False, True), (2, False, False), (2, True, True)])
def test_the_validation_before_training_is_not_made_again(trainer, step, val_only, validates):
    """verl asks for it at every start. With val_only it is the run's only task, and validates the checkpoint."""
    if step:
        saved(trainer, step)
    made = trainer(val_before_train=True, val_only=val_only)
    resume_step(made, "")
    assert made.config.trainer.val_before_train is validates


def test_without_a_checkpoint_training_begins(trainer, capsys):
    made = trainer()
    resume_step(made, "")
    assert made.global_steps == 0 and "training begins at step 1" in capsys.readouterr().out


def test_a_step_has_its_name_only_after_its_metrics_are_logged(trainer):
    made = trainer(3)
    save_step(made, CheckpointSettings())
    process_publisher().logged(2, {})
    assert newest_step(made.root) == (None, [])
    process_publisher().logged(3, {})
    assert newest_step(made.root) == (3, [])


def test_what_is_written_in_the_background_has_its_name_when_it_is_finished(trainer):
    """The state is that of the step's end although the driver has moved on; no older checkpoint is deleted before."""
    keep = CheckpointSettings(keep_last=1)
    root = saved(trainer, 2).root
    made = begun(trainer, 4, keep)
    made.train_dataloader.place = 5
    assert kept(root) == [2] and newest_step(root) == (2, [])
    calls = []
    process_publisher().finishing_first(lambda batch: calls.append((batch, kept(root))))("batch")
    assert calls == [("batch", [4])]
    assert read_trainer(step_folder(root, 4))["data"]["position"] == 4
    process_publisher().finish()
    assert kept(root) == [4]


def test_a_save_waits_for_the_one_before_it(trainer):
    root = begun(trainer, 2).root
    begun(trainer, 4)
    assert kept(root) == [2]
    process_publisher().finish()
    assert kept(root) == [2, 4]


class Unreachable(Exception):
    pass


@pytest.mark.parametrize(("error", "steps"), [(None, [2, 4]), (ValueError, [2, 4]), (Unreachable, [2])])
def test_the_end_of_a_run_finishes_what_is_being_written(trainer, error, steps):
    saved(trainer, 2)
    with pytest.raises(error) if error else nullcontext(), process_publisher().finishing_at_end(Unreachable):
        root = begun(trainer, 4).root
        if error:
            raise error
    assert kept(root) == steps


def test_workers_that_could_not_write_end_the_run_before_its_next_update(trainer, capsys):
    root = saved(trainer, 2).root

    def full():
        raise CheckpointError("no room")

    def failing():
        made = begun(trainer, 4, CheckpointSettings(keep_last=1))
        made.actor_rollout_wg.finish_checkpoint = full
        process_publisher().hold(root, 4, lambda: {}, CheckpointSettings(keep_last=1), full)
        process_publisher().logged(4, {})

    failing()
    with pytest.raises(CheckpointError, match="no room"):
        process_publisher().finishing_first(pytest.fail)("batch")
    assert kept(root) == [2] and newest_step(root) == (2, [])
    with pytest.raises(ValueError, match="the reward"), process_publisher().finishing_at_end(Unreachable):
        failing()
        raise ValueError("the reward")
    assert "warning: the last checkpoint could not be completed: no room" in capsys.readouterr().out


class Killed(BaseException):
    """Stands for SIGKILL: no code of the process runs after it."""


def killed_at(monkeypatch, count):
    """End the process before its `count`-th operation that changes a folder. Return the counter of such operations."""
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


@pytest.mark.parametrize("in_background", [False, True])
def test_a_kill_at_any_write_or_rename_leaves_a_whole_checkpoint(trainer, monkeypatch, tmp_path, in_background):
    """Step 4 replaces step 2, with one kept. The newest checkpoint is whole each time, and the next save succeeds."""
    process_publisher().previous = 0
    root, template = saved(trainer, 2).root, tmp_path / "template"
    shutil.copytree(root, template)
    found, count = set(), 0
    while True:
        count += 1
        shutil.rmtree(root)
        shutil.copytree(template, root)
        process_publisher().previous = 2
        with monkeypatch.context() as patches:
            done = killed_at(patches, count)
            try:
                saved(trainer, 4, max_actor_ckpt_to_keep=1, in_background=in_background)
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


def test_save_under_its_final_name_detected(trainer, monkeypatch, tmp_path):
    monkeypatch.setattr("verl_patches.features.training_checkpoint.step_folders._partial", step_folder)
    monkeypatch.setattr(saving, "publish_step", lambda root, step: None)
    monkeypatch.setattr(saving, "set_aside", lambda root, after: [])
    with pytest.raises(AssertionError, match="not a complete checkpoint"):
        test_a_kill_at_any_write_or_rename_leaves_a_whole_checkpoint(trainer, monkeypatch, tmp_path, False)


@pytest.fixture(autouse=True)
def fresh():
    """Start and end each test with a publisher that has not resumed from anything."""
    process_publisher().previous, process_publisher()._logged = 0, None
    yield
    process_publisher().previous, process_publisher()._logged = 0, None


@pytest.mark.parametrize("ours", [True, False])
def test_only_the_newest_are_kept_and_never_fewer_than_asked_for(trainer, ours):
    keys = {"keep": CheckpointSettings(keep_last=2)} if ours else {"max_actor_ckpt_to_keep": 2}
    for step in (1, 2, 3, 4):
        assert kept(saved(trainer, step, **keys).root) == [number for number in (step - 1, step) if number]


def test_some_steps_and_the_best_are_kept_besides(trainer, capsys):
    keep = CheckpointSettings(keep_last=1, keep_every=4, keep_best=KeepBest("val/score", "max", 2))
    for step, score in enumerate((0.5, 0.9, 0.1, 0.2, 0.7, None, 0.9), start=1):
        root = saved(trainer, step, keep, {} if score is None else {"val/score": score}).root
    assert kept(root) == [2, 4, 7]
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert warning.startswith("warning: step 6 has no val/score, so its checkpoint is not one of the best")


def test_the_one_that_a_run_went_on_from_stays_until_a_newer_one_is_complete(trainer, monkeypatch):
    """A run goes back from step 6 to step 2. The later checkpoints are set aside, and neither counted nor deleted."""
    keep = CheckpointSettings(keep_last=1)
    for step in (2, 4, 6):
        root = saved(trainer, step).root
    resume_step(trainer(resume_mode="resume_path", resume_from_path=str(step_folder(root, 2))), "")
    made = trainer(4)
    save_step(made, keep)
    assert kept(root) == [2, 4, 6]
    process_publisher().logged(4, {})
    assert kept(root) == [4] and newest_step(root) == (4, [])
    aside = sorted(folder.name for folder in root.iterdir() if "." in folder.name and folder.is_dir())
    assert aside == ["global_step_4.set_aside.1", "global_step_6.set_aside.1"]


def test_without_setting_aside_the_branch_that_was_left_would_be_gone_on_from(trainer, monkeypatch):
    monkeypatch.setattr(saving, "set_aside", lambda root, after: [])
    with pytest.raises(AssertionError):
        test_the_one_that_a_run_went_on_from_stays_until_a_newer_one_is_complete(trainer, monkeypatch)


def test_next_checkpoint_completes_an_interrupted_deletion(trainer):
    root = saved(trainer, 2).root
    (root / "global_step_1.deleting" / "actor").mkdir(parents=True)
    (root / "global_step_3.partial").mkdir()
    saved(trainer, 4)
    assert sorted(folder.name for folder in root.iterdir() if folder.is_dir()) == ["global_step_2", "global_step_4"]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "not a complete checkpoint"),
        (lambda folder: (folder / "actor" / "manifest.json").unlink(), "not a complete checkpoint"),
        (lambda folder: (folder / "trainer.json").write_text("{}"), "trainer.json: has SHA-256"),
        (lambda folder: next((folder / "actor").glob("rank*")).write_text("cut"), "missing, or does not have 15 bytes"),
        (lambda folder: next((folder / "actor").glob("rank*")).unlink(), "missing, or does not have 15 bytes"),
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


def test_other_data_and_a_folder_that_is_none_rejected(trainer, tmp_path):
    root = saved(trainer, 2).root
    made = trainer()
    made.data.write_text("other rows")
    with pytest.raises(CheckpointError, match="was trained on other data than data.train_files="):
        resume_step(made, "")
    made = trainer(resume_mode="resume_path", resume_from_path=str(root))
    with pytest.raises(CheckpointError, match="not the folder of a checkpoint, which is named global_step_"):
        resume_step(made, "")


def test_a_folder_that_takes_nothing_is_named(trainer, tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(
        CheckpointError, match=r"default_local_dir=.*checkpoints is invalid: it cannot store a checkpoint \("
    ):
        save_step(trainer(1), CheckpointSettings())


@pytest.mark.parametrize("where", ["workers", "driver"])
def test_a_save_that_fails_is_told_and_the_one_before_it_is_gone_on_from(trainer, monkeypatch, where):
    saved(trainer, 2)
    made = trainer(4)

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patches:
        if where == "workers":
            made.actor_rollout_wg.save_checkpoint = full
        else:
            patches.setattr(os, "fsync", full)
        with pytest.raises(
            CheckpointError, match="is invalid: it cannot store a checkpoint .No space left on device.. Choose"
        ):
            save_step(made, CheckpointSettings(keep_last=1))
            process_publisher().logged(4, {})
    assert newest_step(made.root) == (2, [])
    made = trainer()
    resume_step(made, "")
    assert made.global_steps == 2


def test_the_kl_coefficient_goes_on_too(trainer):
    made = trainer(2)
    made.kl_ctrl_in_reward = SimpleNamespace(value=0.25)
    save_step(made, CheckpointSettings())
    process_publisher().logged(2, {})
    made = trainer()
    made.kl_ctrl_in_reward = SimpleNamespace(value=0.001)
    resume_step(made, "")
    assert made.kl_ctrl_in_reward.value == 0.25


def test_random_numbers_and_states_of_other_features_go_on_too(trainer):
    random.seed(3), numpy.random.seed(4), torch.manual_seed(5)
    counters, drawn = {"runs": 7}, []
    process_kept_states().register("counters", lambda: dict(counters), drawn.append)
    root = saved(trainer, 2).root
    expected = random.random(), numpy.random.rand(), torch.rand(1).item()
    assert kept_in_checkpoint(trainer().config.trainer, "counters") == {"runs": 7}
    counters["runs"] = 9
    resume_step(trainer(), "")
    assert drawn == [{"runs": 7}] and (random.random(), numpy.random.rand(), torch.rand(1).item()) == expected
    assert kept_in_checkpoint(trainer(resume_mode="disable").config.trainer, "counters") is None
    assert kept_in_checkpoint(trainer().config.trainer, "another") is None and root.is_dir()


def test_other_batches_and_another_model_rejected(trainer, tmp_path):
    def of(model_size):
        folder = tmp_path / f"model{model_size}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"hidden_size": model_size, "torch_dtype": str(model_size)}))
        return folder

    def at(step, model=32, n=4, **data):
        made = trainer(step, data)
        node = {"model": {"path": str(of(model))}, "rollout": {"n": n}}
        made.config.merge_with({"actor_rollout_ref": node})
        return made

    save_step(at(2, train_batch_size=8), CheckpointSettings())
    process_publisher().logged(2, {})
    for changed, sentence in (
        ({"train_batch_size": 16}, "trained with data.train_batch_size=8, but this run has 16.*. Set data.train_batch"),
        ({"train_batch_size": 8, "n": 8}, "trained with actor_rollout_ref.rollout.n=4, but this run has 8"),
        (
            {"train_batch_size": 8, "model": 64},
            "has hidden_size=32, but .*model.path has 64. Set it to the trained model",
        ),
    ):
        made = at(0, **changed)
        with pytest.raises(CheckpointError, match=sentence):
            resume_step(made, "")
        assert made.global_steps == 0 and not hasattr(made.actor_rollout_wg, "loaded")
    resume_step(at(0, train_batch_size=8), "")


@pytest.mark.parametrize("first", [True, False], ids=["gone", "new"])
@pytest.mark.parametrize("key", ["rope_scaling", "hidden_size", "first_k_dense_replace"])
def test_a_key_that_one_of_two_models_has_is_named(trainer, tmp_path, first, key):
    """An example is a rope_scaling that was added to the model's folder."""
    known = {"hidden_size": 32, "num_hidden_layers": 4, "rope_scaling": {"type": "linear", "factor": 2}}
    configs = [{**known, key: 8}, {name: value for name, value in known.items() if name != key}]
    for step, config in zip((2, 0), configs if first else configs[::-1], strict=True):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        made = trainer(step)
        made.config.merge_with({"actor_rollout_ref": {"model": {"path": str(tmp_path / "model")}}})
        if step:
            save_step(made, CheckpointSettings())
            process_publisher().logged(step, {})
    then, now = ("8", "None") if first else ("None", "8")
    with pytest.raises(CheckpointError, match=f"config.json has {key}={then}, but .* has {now}. Set it to the"):
        resume_step(made, "")


@pytest.mark.parametrize("key", ["_name_or_path", "torch_dtype", "transformers_version", "use_cache"])
def test_a_key_that_says_nothing_of_the_model_may_come_and_go(trainer, tmp_path, key):
    for step, config in ((2, {"hidden_size": 32}), (0, {"hidden_size": 32, key: "other"})):
        (tmp_path / "config.json").write_text(json.dumps(config))
        made = trainer(step)
        made.config.merge_with({"actor_rollout_ref": {"model": {"path": str(tmp_path)}}})
        if step:
            save_step(made, CheckpointSettings())
            process_publisher().logged(step, {})
    resume_step(made, "")
    assert made.global_steps == 2


def test_a_checkpoint_that_says_less_is_gone_on_from(trainer, monkeypatch, capsys):
    """Earlier versions wrote such checkpoints."""
    known = {"step", "data", "data_sha256", "kl_coefficient"}
    whole = saving.trainer_state
    monkeypatch.setattr(saving, "trainer_state", lambda made: {k: v for k, v in whole(made).items() if k in known})
    saved(trainer, 2)
    made = trainer()
    resume_step(made, "")
    assert made.global_steps == 2 and "warning" not in capsys.readouterr().out
    assert kept_in_checkpoint(made.config.trainer, "faults") is None


def test_other_settings_and_software_are_said_in_one_warning(trainer, monkeypatch, capsys):
    saved(trainer, 2)
    resume_step(trainer(resume_mode="auto", save_freq=7), "")
    assert "warning" not in capsys.readouterr().out
    before = circumstances.software()
    monkeypatch.setattr(circumstances, "software", lambda: before | {"verl": "verl 0.5.0"})
    resume_step(trainer(0, {"seed": 3}), "")
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert warning.endswith(f"data.seed was None and is 3; verl was {before['verl']} and is verl 0.5.0")


def test_records_of_steps_that_are_trained_again_are_taken_back(trainer, tmp_path):
    lines = [json.dumps({"step": step, "time": 1.0, "metrics": {}}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "met')
    early, late = (
        json.dumps({"time": 1.0, "kind": "not_answering", "step": step, "message": "rank 1 ..."}) for step in (None, 3)
    )
    (tmp_path / "faults.jsonl").write_text(f"{early}\n{late}\n")
    saved(trainer, 2)
    resume_step(trainer(), str(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:2]
    assert (tmp_path / "faults.jsonl").read_text().splitlines() == [early]
    take_back_steps("", 2)


DAMAGES = (
    b"\0" * 64,
    b'{"step": 2, "time": 1.0, "metr',
    b"\xff\xfe",
    b"[1]",
    b'{"step": "2", "time": 1.0, "metrics": {}}',
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_lines_set_aside_counted_and_said(trainer, tmp_path, capsys, damage):
    """A power loss or a full disk leaves such whole lines; the steps around them are kept."""
    lines = [json.dumps({"step": step, "time": 1.0, "metrics": {"a": 0.5}}).encode() for step in (1, 2, 3)]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b"\n".join([lines[0], damage, lines[1], damage, lines[2]]) + b"\n" + lines[0][:9])
    (tmp_path / "events.jsonl").write_bytes(damage + b'\n{"time": 1.0, "event": "ray_ready"}\n')
    saved(trainer, 2)
    resume_step(trainer(), str(tmp_path))
    said = capsys.readouterr().out
    assert f"{metrics}: 2 damaged lines were set aside in metrics.jsonl.damaged" in said
    assert "events.jsonl: 1 damaged line was set aside" in said
    assert metrics.read_bytes().splitlines() == lines[:2]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == (damage + b"\n") * 2
    assert [record.step for record in read_records(metrics)] == [1, 2]
    assert read_entries(tmp_path / "events.jsonl") == [{"time": 1.0, "event": "ray_ready"}]


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_record_that_a_run_writes_may_be_damaged(trainer, tmp_path, own_context, capsys, damage):
    """This covers every file that a run writes line by line, in subfolders too."""
    files = run_files.RunFiles(str(tmp_path))
    files.step(1, {"a": 0.5}), files.note("ray_ready"), files.fault("kind", "message", 1), files.executed(["patch"])
    files.alert({"step": 1, "alert": "kl", "message": "high"})
    records = sorted(tmp_path.rglob("*.jsonl"))
    written = {file: file.read_bytes() for file in records}
    for file in records:
        file.write_bytes(damage + b"\n" + written[file])
    saved(trainer, 2)
    resume_step(trainer(), str(tmp_path))
    assert {file: file.read_bytes() for file in records} == written and len(records) == 5
    assert capsys.readouterr().out.count("damaged line was set aside") == len(records)
    assert run_files.read_executed(tmp_path) == ["patch"]


def test_checkpoint_without_a_rank_file_not_published(trainer, monkeypatch):
    """Another process removed it between the workers' manifest and the end of the step."""
    monkeypatch.setattr(manifest, "_SEEN_WITHIN_S", 0)
    monkeypatch.setattr(manifest, "_POLL_S", 0)
    made = trainer(3)
    save_step(made, CheckpointSettings())
    next(made.root.glob("global_step_3.partial/actor/rank-*")).unlink()
    with pytest.raises(CheckpointError, match="rank-00000-of-00001.safetensors: is missing instead of the"):
        process_publisher().logged(3, {})
    assert newest_step(made.root) == (None, []) and not list(made.root.glob("global_step_3.partial/manifest.json"))


def test_nothing_that_is_saved_is_a_pickle(trainer):
    root = saved(trainer, 2).root
    assert {file.name for file in root.rglob("*") if file.is_file()} == {
        "trainer.json", "manifest.json", "rank-00000-of-00001.safetensors", "latest_checkpointed_iteration.txt"
    }  # fmt: skip
    state = json.loads((step_folder(root, 2) / "trainer.json").read_text())
    assert saving.trainer_state(trainer(2)) | {"score": None} == state
