"""The latest complete folder of a step is found, and one of an interrupted save is named and skipped."""

import pytest

from post_training.checkpoint.complete_files import withdraw_complete, write_complete
from post_training.checkpoint.files import CheckpointError
from verl_plugin.resume.checks import ENGINES, KEYS, resume_problems
from verl_plugin.resume.step_folders import (
    TRACKER_NAME,
    check_complete,
    newest_complete,
    tracked_step,
)


@pytest.fixture
def checkpoints(tmp_path):
    """Steps 9 and 10, both complete."""
    for step in (9, 10):
        folder = tmp_path / f"global_step_{step}"
        (folder / "actor").mkdir(parents=True)
        (folder / "actor" / "rank_0.pt").write_bytes(bytes(100))
        (folder / "data.pt").write_bytes(bytes(3))
        write_complete(folder)
    (tmp_path / TRACKER_NAME).write_text("10")
    return tmp_path


def test_newest_step_is_found_by_number(checkpoints):
    assert newest_complete(checkpoints) == (checkpoints / "global_step_10", [])
    assert check_complete(checkpoints / "global_step_10") == 10 and tracked_step(checkpoints) == 10


def test_step_without_metrics_is_passed_over(checkpoints):
    folder, [sentence] = newest_complete(checkpoints, 9)
    assert (
        folder == checkpoints / "global_step_9" and "global_step_10 is complete, but the run ended before" in sentence
    )
    assert newest_complete(checkpoints, 10)[0] == checkpoints / "global_step_10"


DAMAGES = {
    "actor/rank_0.pt is missing": lambda step: (step / "actor" / "rank_0.pt").unlink(),
    "actor/rank_0.pt has 60 bytes instead of 100": lambda step: (step / "actor" / "rank_0.pt").write_bytes(bytes(60)),
    "it has no complete.json, which is written last": withdraw_complete,
    "complete.json cannot be read": lambda step: (step / "complete.json").write_text("{"),
}


@pytest.mark.parametrize("says", DAMAGES)
def test_incomplete_step_is_named_and_passed_over(checkpoints, says):
    DAMAGES[says](checkpoints / "global_step_10")
    folder, [sentence] = newest_complete(checkpoints)
    assert folder == checkpoints / "global_step_9" and "global_step_10 is not complete" in sentence and says in sentence
    [problem] = resume_problems(config(checkpoints, "auto"))
    assert says in problem and problem.endswith(f"and trainer.resume_from_path to {folder}.")


def test_complete_step_and_new_run_pass(checkpoints, tmp_path):
    step = str(checkpoints / "global_step_9")
    for mode, path in (("auto", None), ("disable", None), ("resume_path", step)):
        assert list(resume_problems(config(checkpoints, mode, path))) == []
    assert list(resume_problems(config(tmp_path / "new", "auto"))) == []


def test_damaged_tracker_is_named(checkpoints):
    (checkpoints / TRACKER_NAME).write_text("")
    with pytest.raises(CheckpointError, match=f"{TRACKER_NAME} is damaged"):
        tracked_step(checkpoints)
    [problem] = resume_problems(config(checkpoints, "auto"))
    assert "global_step_10" in problem


def config(checkpoints, mode, path=None, **changes):
    sampler = {"path": KEYS["trainer.v1.sampler.custom_sampler.path"], "name": "OrderedReplayBuffer"}
    trainer = {
        "resume_mode": mode, "resume_from_path": path, "default_local_dir": str(checkpoints), "save_freq": 1,
        "max_actor_ckpt_to_keep": 2, "v1": {"trainer_mode": "sync", "sampler": {"custom_sampler": sampler}},
    }  # fmt: skip
    manager = KEYS["actor_rollout_ref.rollout.agent.agent_loop_manager_class"]
    rollout = {"agent": {"agent_loop_manager_class": changes.pop("manager", manager)}}
    trainer["v1"]["trainer_mode"] = changes.pop("trainer_mode", "sync")
    filtered = {"enable": changes.pop("filtered", False)}
    return {
        "trainer": trainer | changes,
        "actor_rollout_ref": {"rollout": rollout},
        "algorithm": {"filter_groups": filtered},
    }


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"manager": None}, "agent_loop_manager_class=None is invalid"),
        ({"trainer_mode": "colocate_async"}, "trains on answers in order of arrival"),
        ({"filtered": True}, "leaves the filter of groups"),
        ({"max_actor_ckpt_to_keep": 1}, "max_actor_ckpt_to_keep=1 is invalid"),
    ],
)
def test_settings_that_lose_checkpoints_or_order_rejected(tmp_path, change, says):
    [problem] = resume_problems(config(tmp_path, "disable", **change))
    assert says in problem


def on_host(checkpoints, libraries, reshardable=True, **changes):
    """Return a Megatron-core job's configuration with the optimizer on the host."""
    found = config(checkpoints, "disable", **changes)
    found["actor_rollout_ref"] |= {
        "model": {"external_lib": libraries},
        "actor": {
            "optim": {"override_optimizer_config": {"optimizer_cpu_offload": True}},
            "megatron": {"dist_ckpt_optim_fully_reshardable": reshardable},
        },
    }
    return found


@pytest.mark.parametrize(
    ("libraries", "reshardable", "says"),
    [
        (["verl_plugin.mindspeed"], True, f"Set it to [..., {ENGINES}], or trainer.save_freq to -1."),
        (None, True, "saves an optimizer that it cannot load"),
        ([ENGINES], False, "dist_ckpt_optim_fully_reshardable=False is invalid"),
    ],
)
def test_optimizer_on_the_host_that_cannot_be_loaded_rejected(tmp_path, libraries, reshardable, says):
    [problem] = resume_problems(on_host(tmp_path, libraries, reshardable))
    assert says in problem
    assert list(resume_problems(on_host(tmp_path, libraries, reshardable, save_freq=-1))) == []


def test_optimizer_on_the_host_that_is_loaded_passes(tmp_path):
    assert list(resume_problems(on_host(tmp_path, [ENGINES]))) == []
    assert list(resume_problems(on_host(tmp_path, ENGINES))) == []
