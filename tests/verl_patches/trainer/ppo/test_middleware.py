"""The order in which features wrap the training loop, and the effects of their hooks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from overlay import Feature
from post_training.hang_detection.signs import process_signs
from post_training.report.run_error import RunError
from verl_patches.features import settings
from verl_patches.features.alerts.feature import ALERTS
from verl_patches.features.alerts.watcher import StoppedByAlert
from verl_patches.features.catalogue import FEATURES
from verl_patches.features.measure.feature import MEASURE, MeasureSettings
from verl_patches.features.overlong.feature import OVERLONG_PENALTY
from verl_patches.features.profile.feature import PROFILE, ProfileSettings
from verl_patches.features.settings import OverlaySettings
from verl_patches.features.tracking.feature import TRACKING
from verl_patches.features.tracking.run import RunTrackers
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT
from verl_patches.features.watch.feature import WATCH
from verl_patches.trainer.ppo.middleware import MIDDLEWARE, Middleware, dress, in_force
from verl_patches.trainer.ppo.trainer import OverlayTrainer, overlaid

WATCHER = "verl_patches.features.alerts.watcher"
PUBLISHER = "verl_patches.features.training_checkpoint.trainer.process_publisher"


def of(feature: Feature) -> Middleware:
    (found,) = [each for each in MIDDLEWARE if each.feature is feature]
    return found


def trainer_of(log: Callable[[Any], Any] = lambda metrics: None, **more: Any) -> Any:
    """Return a trainer in its third step that has workers and no critic."""
    given = {"reward_fn": None, "val_reward_fn": None, "use_critic": False, "use_reference_policy": False}
    given |= {"global_steps": 3, "actor_rollout_wg": SimpleNamespace(), "log": log}
    return SimpleNamespace(**given | more)


def test_middleware_goes_around_what_it_names():
    features = [each.feature for each in MIDDLEWARE]
    assert len(set(features)) == len(features) and set(features) <= set(FEATURES)
    for place, each in enumerate(MIDDLEWARE):
        assert set(each.outside) <= set(features[:place]), each.feature.name


def test_middleware_in_force_is_that_of_features_that_are_on(monkeypatch):
    monkeypatch.setattr(settings, "_current", OverlaySettings.all_off())
    always = [each.feature for each in in_force()]
    assert MEASURE in always and OVERLONG_PENALTY not in always
    monkeypatch.setattr(settings, "_current", OverlaySettings(overlong_penalty=True))
    assert OVERLONG_PENALTY in [each.feature for each in in_force()]


def test_a_trainer_starts_its_workers_between_the_hooks(monkeypatch, capsys):
    order: list[str] = []

    class Verls(RayPPOTrainer):
        def init_workers(self) -> None:
            order.append("workers")

    class Trainer(OverlayTrainer, Verls):
        def __init__(self) -> None:
            vars(self).update(vars(trainer_of()))

    hooks = Middleware(
        MEASURE,
        around=lambda trainer: {"log": lambda log: order.append("around") or log},
        before_workers=lambda trainer: order.append("before"),
    )
    with mock.patch("verl_patches.trainer.ppo.middleware.MIDDLEWARE", (hooks,)):
        Trainer().init_workers()
    assert order == ["before", "workers", "around"]
    assert "features of a step, from the workers outwards: measure\n" in capsys.readouterr().out


@pytest.mark.parametrize(("previous", "taken"), [(2, [(3, {"reward": 0.5})]), (3, [])])
def test_an_alert_is_taken_before_a_step_is_published_and_ends_the_run_behind(previous, taken):
    """A validation of the step from which a run resumes is not a new step."""
    order: list[Any] = []

    def take(step: int, metrics: Any) -> str:
        order.append((step, metrics))
        return "too low"

    trainer = trainer_of(log=lambda metrics: order.append("published"))
    with (
        mock.patch(f"{WATCHER}.process_alerts", return_value=SimpleNamespace(take=take)),
        mock.patch(PUBLISHER, return_value=SimpleNamespace(previous=previous)),
    ):
        dress(trainer, [of(ALERTS)])
        with pytest.raises(StoppedByAlert, match="too low") if taken else contextlib.nullcontext():
            trainer.log({"reward": 0.5})
    assert order == [*taken, "published"]


def test_an_alert_ends_the_run_with_the_step_saved(monkeypatch):
    monkeypatch.setattr(settings, "_current", OverlaySettings.all_off())
    saved: list[int] = []
    config = OmegaConf.create({"trainer": {"default_local_dir": "/nowhere"}})
    trainer = trainer_of(config=config, _save_checkpoint=lambda: saved.append(3))
    with (
        mock.patch(f"{WATCHER}.process_publisher"),
        pytest.raises(RunError, match="alert; the run is saved"),
        of(ALERTS).training(trainer),
    ):
        raise StoppedByAlert("alert")
    assert saved == [3]


def test_a_checkpoint_gets_its_name_behind_the_trackers():
    """Otherwise a resume could lack the metrics of the step from which it starts."""
    order: list[Any] = []
    trackers = SimpleNamespace(log=lambda data, step: order.append(("logged", step, data)))
    trainer = trainer_of(trackers=trackers)
    trainer.publish_checkpoint = partial(OverlayTrainer.publish_checkpoint, trainer)
    publisher = SimpleNamespace(logged=lambda step, metrics: order.append(("published", step, metrics)))
    with mock.patch(PUBLISHER, return_value=publisher):
        OverlayTrainer.log(trainer, {"reward": 0.5})
    assert order == [("logged", 3, {"reward": 0.5}), ("published", 3, {"reward": 0.5})]


def test_a_checkpoint_of_a_loop_that_publishes_none_gets_its_name(monkeypatch, capsys):
    """A recipe's trainer class, derived from verl's, saves when it likes and publishes nothing after its log."""
    monkeypatch.setattr(settings, "_current", OverlaySettings.all_off())

    class Recipe(RayPPOTrainer):
        def __init__(self) -> None:
            config = {"actor_rollout_ref": {"actor": {"strategy": "fsdp"}}}
            vars(self).update(vars(trainer_of(config=OmegaConf.create(config))))

        def fit(self) -> None:
            self._save_checkpoint()

    order: list[Any] = []
    trainer = Recipe()
    trainer.__class__ = overlaid(Recipe)
    publisher = SimpleNamespace(logged=lambda step, metrics: order.append(("published", step)))
    with (
        mock.patch("verl_patches.trainer.ppo.middleware.MIDDLEWARE", ()),
        mock.patch.object(RayPPOTrainer, "init_workers", lambda self: None),
        mock.patch("verl_patches.features.training_checkpoint.trainer.save_step", lambda *_: order.append("saved")),
        mock.patch(PUBLISHER, return_value=publisher),
    ):
        trainer.init_workers()
        trainer.fit()
    assert order == ["saved", ("published", 3)]
    assert "warning: Recipe has its own loop" in capsys.readouterr().out


def test_the_end_of_a_run_waits_for_its_last_checkpoint():
    with mock.patch(PUBLISHER) as publisher, of(TRAINING_CHECKPOINT).training(trainer_of()):
        pass
    assert len(publisher.return_value.finishing_at_end.call_args_list) == 1


def test_training_begins_with_an_event(monkeypatch, tmp_path):
    chosen = OverlaySettings(measure=MeasureSettings(output_dir=str(tmp_path)))
    monkeypatch.setattr(settings, "_current", chosen)
    with of(MEASURE).training(trainer_of()):
        events = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events == ["training_begins"]


def test_trackers_learn_how_the_training_ended(own_context):
    trackers = own_context.keep(RunTrackers.__new__(RunTrackers))
    with (
        mock.patch.object(trackers, "close") as close,
        pytest.raises(ValueError, match="no"),
        of(TRACKING).training(trainer_of()),
    ):
        raise ValueError("no")
    assert [call.args for call in close.call_args_list] == [("failed",)]


def test_the_loop_is_watched_in_a_phase_of_its_own(monkeypatch):
    monkeypatch.setattr(settings, "_current", OverlaySettings.all_off())
    trainer = trainer_of()
    with mock.patch("post_training.hang_detection.signs.start_in_ray") as begun:
        of(WATCH).before_workers(trainer)
    assert [call.args[0] for call in begun.call_args_list] == ["trainer"]
    entered: list[str] = []
    monkeypatch.setattr(process_signs(), "phase", lambda name: entered.append(name) or contextlib.nullcontext())
    with of(WATCH).training(trainer):
        assert process_signs().step() == 3
    assert entered == ["driver"]


def test_a_step_is_recorded_from_its_generation_on(monkeypatch):
    monkeypatch.setattr(settings, "_current", OverlaySettings(profile=ProfileSettings(steps=(3,))))
    told: list[Any] = []
    group = SimpleNamespace(
        generate_sequences=lambda batch: told.append("generated"),
        update_actor=lambda batch: told.append("updated"),
        profile_step=told.append,
    )
    dress(trainer_of(actor_rollout_wg=group), [of(PROFILE)])
    group.generate_sequences(SimpleNamespace(meta_info={}))
    group.update_actor(None)
    assert told == [3, "generated", "updated", None]


def test_only_rewards_of_training_are_penalised():
    buffer = {"enable": True, "len": 2, "penalty_factor": 1.0}
    config = {"data": {"max_response_length": 4}, "reward_model": {"overlong_buffer": buffer}}
    trainer = trainer_of(config=OmegaConf.create(config), reward_fn=len, val_reward_fn=len)
    dress(trainer, [of(OVERLONG_PENALTY)])
    assert trainer.reward_fn is not len and trainer.val_reward_fn is len
