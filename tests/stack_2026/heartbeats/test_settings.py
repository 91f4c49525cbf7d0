"""The group `trainer.hang_detection`: its valid values, and the requirements of a job that uses it."""

from typing import Any

import pytest

from verl_plugin.heartbeats.settings import ENGINES, HangDetection, hang_problems


def job(**values: Any) -> dict[str, Any]:
    v1 = {"trainer_mode": "sync_onpolicy"}
    trainer = {"default_local_dir": "/runs/one/checkpoints", "v1": v1, "hang_detection": {"enabled": True, **values}}
    return {"trainer": trainer, "actor_rollout_ref": {"model": {"external_lib": [ENGINES]}}}


def test_a_job_has_limits_and_the_folder_of_its_checkpoints():
    config = job(warn_s={"update": 100})
    chosen = HangDetection.from_config(config)
    assert not list(hang_problems(config))
    assert (chosen.warn_s.update, chosen.warn_s.ref, chosen.folder) == (100, 600.0, "/runs/one")
    assert HangDetection.unpacked(chosen.packed()) == chosen


def test_without_the_group_nothing_is_watched():
    config = job()
    del config["trainer"]["hang_detection"]
    assert not HangDetection.from_config(config).enabled and not list(hang_problems(config))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"interval": 3}, "trainer.hang_detection.interval is invalid: no such option"),
        ({"warn_s": {"updaet": 3}}, "trainer.hang_detection.warn_s.updaet is invalid"),
        ({"interval_s": -1}, "trainer.hang_detection.interval_s=-1 is invalid"),
        ({"interval_s": float("nan")}, "trainer.hang_detection.interval_s=nan is invalid"),
        ({"calls_after_s": "1"}, "trainer.hang_detection.calls_after_s=1 is invalid"),
        ({"folder": 3}, "trainer.hang_detection.folder=3 is invalid"),
        ({"warn_s": {"ref": 2000}}, "trainer.hang_detection.warn_s.ref=2000 is not below"),
    ],
)
def test_invalid_group_rejected(values, says):
    assert next(hang_problems(job(**values))).startswith(says)


def test_trainer_without_hang_reports_rejected():
    config = job()
    config["trainer"]["v1"]["trainer_mode"] = "sync"
    assert "the trainer trainer.v1.trainer_mode=sync does not report hung ranks" in next(hang_problems(config))


def test_training_without_heartbeats_rejected():
    config = job()
    config["actor_rollout_ref"]["model"]["external_lib"] = None
    assert ENGINES in next(hang_problems(config))
