"""The driver's patches, called directly with a trainer that only remembers."""

import json
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from overlay import ConfigurationError
from tests.demonstrations import installed
from tests.verl_patches.trainer.configuration_checks.test_fsdp import PUBLISHED
from verl_patches.features import settings
from verl_patches.features.measure.feature import MeasureSettings
from verl_patches.features.settings import OverlaySettings
from verl_patches.trainer import main_ppo
from verl_patches.trainer.main_ppo import compose
from verl_patches.trainer.ppo import ray_trainer
from verl_patches.utils import tracking


@pytest.fixture
def active(monkeypatch, tmp_path):
    """Activate settings for one test; files go to a folder of its own."""

    def put_in_force(**changes):
        chosen = OverlaySettings(measure=MeasureSettings(output_dir=str(tmp_path)), **changes)
        monkeypatch.setattr(settings, "_current", chosen)
        return tmp_path

    return put_in_force


class Workers:
    """A worker group whose forward must not be asked for."""

    def __init__(self):
        self.calls = 0

    def compute_log_prob(self, batch):
        self.calls += 1


def started(trainer):
    trainer.actor_rollout_wg = Workers()


def test_old_log_prob_is_answered_by_the_driver_without_a_call(active):
    active(recompute_old_log_prob=False)
    trainer = SimpleNamespace()
    ray_trainer.init_workers(started, trainer)
    batch = SimpleNamespace(batch={"responses": torch.zeros(4, 6, dtype=torch.int64)})
    answer = trainer.actor_rollout_wg.compute_log_prob(batch)
    assert trainer.actor_rollout_wg.calls == 0
    assert set(answer.batch.keys()) == {"old_log_probs", "entropys"}
    assert all(column.shape == (4, 6) and column.isnan().all() for column in answer.batch.values())


def test_with_recomputation_the_workers_are_asked(active):
    active(recompute_old_log_prob=True)
    trainer = SimpleNamespace()
    installed(ray_trainer.init_workers, started)(trainer)
    trainer.actor_rollout_wg.compute_log_prob(None)
    assert trainer.actor_rollout_wg.calls == 1


def test_the_driver_activates_the_settings_and_marks_its_progress(active, monkeypatch):
    folder = active()
    overlay = "actor_rollout_ref.overlay"
    config = compose("rehearsal", [f"{overlay}.precision=float32", f"{overlay}.measure.output_dir={folder}"])
    inner = installed(ray_trainer.init_noted, lambda self, config: None)
    ray_trainer.init(inner, SimpleNamespace(), config)
    assert settings.current().precision == "float32"
    assert ray_trainer.fit(lambda self: "fitted", SimpleNamespace()) == "fitted"
    events = [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert events == ["data_ready", "training_begins"]


def test_configuration_of_verl_alone_gets_the_overlays_keys(active):
    """Of a program of a user's own that builds verl's trainer from verl's file: nothing of it refers anywhere then."""
    active()
    verls = OmegaConf.load(main_ppo.verl_config_folder() / "ppo_trainer.yaml")
    given = OmegaConf.merge(verls, OmegaConf.from_dotlist(["actor_rollout_ref.model.path=/weights", *PUBLISHED]))
    seen = []
    ray_trainer.init(lambda self, config: seen.append(config), SimpleNamespace(), given)
    (config,) = seen
    assert settings.current().measure.output_dir == config.trainer.default_local_dir
    assert "overlay" not in given.actor_rollout_ref and "${" not in OmegaConf.to_yaml(config, resolve=False)


def test_the_driver_refuses_what_cannot_run_before_verl_builds_anything(active):
    config = compose("rehearsal", ["actor_rollout_ref.actor.megatron.grad_offload=true"])
    with pytest.raises(ConfigurationError, match="grad_offload=True and .*residency.enabled=true would both move"):
        ray_trainer.init(lambda self, config: pytest.fail("verl was called"), SimpleNamespace(), config)


@pytest.mark.parametrize(("recompute", "kept"), [(True, {"actor/entropy_loss", "reward"}), (False, {"reward"})])
def test_a_step_is_written_and_handed_on_without_made_up_metrics(active, recompute, kept):
    folder = active(recompute_old_log_prob=recompute)
    handed_on = {}

    def upstream(self, data, step, backend):
        handed_on.update(data=data, step=step, backend=backend)

    tracking.log(upstream, None, {"actor/entropy_loss": float("nan"), "reward": 0.5}, 3)
    written = json.loads((folder / "metrics.jsonl").read_text())
    assert written["step"] == handed_on["step"] == 3
    assert set(written["metrics"]) == set(handed_on["data"]) == kept
