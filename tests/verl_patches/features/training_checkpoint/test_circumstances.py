"""Which settings two starts of one run must share, and which differences are only reported."""

import copy
from pathlib import Path

import pytest

from post_training.checkpoint.files import CheckpointError
from verl_patches.features.training_checkpoint.circumstances import check_circumstances, differences

BEFORE = {
    "configuration": {
        "data": {"train_batch_size": 32, "gen_batch_size": 48, "train_files": "/a"},
        "actor_rollout_ref": {
            "rollout": {"n": 8},
            "actor": {"ppo_mini_batch_size": 16, "optim": {"lr": 1e-6}},
            "overlay": {"watch": {"interval_s": 1}},
        },
        "trainer": {"save_freq": 1, "nnodes": 2},
    },
    "model": {"hidden_size": 64, "use_cache": True},
    "software": {"verl": "1", "overlay": "abc"},
}


def changed(path, value):
    now = copy.deepcopy(BEFORE)
    *groups, last = path.split("/")
    node = now
    for group in groups:
        node = node[group]
    node[last] = value
    return now


KEPT = ["data/train_batch_size", "data/gen_batch_size", "actor_rollout_ref/rollout/n",
        "actor_rollout_ref/actor/ppo_mini_batch_size"]  # fmt: skip


@pytest.mark.parametrize("path", KEPT)
def test_sizes_of_a_step_are_kept_for_the_life_of_a_run(path):
    check_circumstances(Path("folder"), BEFORE, copy.deepcopy(BEFORE))
    key = path.replace("/", ".")
    now = changed(f"configuration/{path}", 1)
    with pytest.raises(CheckpointError, match=f"^folder: was trained with {key}=[0-9]+, but this run has 1, so"):
        check_circumstances(Path("folder"), BEFORE, now)
    check_circumstances(Path("folder"), {}, now)  # a checkpoint without this information


def test_another_model_is_named_by_its_first_key():
    now = changed("model/hidden_size", 128)
    with pytest.raises(
        CheckpointError, match="config.json has hidden_size=64, but .* has 128. Set it to the trained model"
    ):
        check_circumstances(Path("folder"), BEFORE, now)
    check_circumstances(Path("folder"), BEFORE, changed("model/use_cache", False))
    check_circumstances(Path("folder"), BEFORE, BEFORE | {"model": None})
    check_circumstances(Path("folder"), BEFORE | {"model": None}, BEFORE)


@pytest.mark.parametrize(
    "path, value, said",
    [
        (
            "configuration/actor_rollout_ref/actor/optim/lr",
            2e-6,
            "actor_rollout_ref.actor.optim.lr was 1e-06 and is 2e-06",
        ),
        ("configuration/trainer/nnodes", 1, "trainer.nnodes was 2 and is 1"),
        ("configuration/trainer/more", 1, "trainer.more was None and is 1"),
        ("software/verl", "2", "verl was 1 and is 2"),
        ("configuration/trainer/save_freq", 5, ""),
        ("configuration/data/train_files", "/b", ""),
        ("configuration/actor_rollout_ref/overlay/watch/interval_s", 5, ""),
        ("model/use_cache", False, ""),
    ],
)
def test_other_changed_settings_are_warned_about(path, value, said):
    assert differences(BEFORE, changed(path, value)) == said


def test_first_differences_are_said_and_the_others_counted():
    now = changed("configuration/more", {letter: 1 for letter in "abcdef"})
    said = "; ".join(f"more.{letter} was None and is 1" for letter in "abcd")
    assert differences(BEFORE, now) == f"{said} and 2 more"
    assert differences({}, now) == ""
