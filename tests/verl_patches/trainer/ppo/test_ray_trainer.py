"""The driver's patch, called directly with a minimal trainer, and the files that a step writes."""

import json
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from overlay import ConfigurationError
from post_training.end_tokens import EndTokens
from tests.verl_patches.trainer.configuration_checks.test_fsdp import PUBLISHED
from verl_patches.features import settings
from verl_patches.features.measure.feature import MEASURE, MeasureSettings
from verl_patches.features.settings import OverlaySettings
from verl_patches.trainer import main_ppo
from verl_patches.trainer.main_ppo import compose
from verl_patches.trainer.ppo import ray_trainer
from verl_patches.trainer.ppo.middleware import MIDDLEWARE, dress
from verl_patches.trainer.ppo.trainer import OverlayTrainer


@pytest.fixture
def active(monkeypatch, tmp_path):
    """Return a function that activates settings for one test, whose files go to a separate folder."""

    def activate(**changes):
        chosen = OverlaySettings(measure=MeasureSettings(output_dir=str(tmp_path)), **changes)
        monkeypatch.setattr(settings, "_current", chosen)
        return tmp_path

    return activate


def test_verls_trainer_becomes_ours(active):
    """This covers verl's own class, a class derived from it with its own loop, and ours."""
    folder = active()
    overlay = "actor_rollout_ref.overlay"
    config = compose("rehearsal", [f"{overlay}.precision=float32", f"{overlay}.measure.output_dir={folder}"])

    class Recipe(RayPPOTrainer):
        def fit(self):
            return "of the recipe"

    for kind in (RayPPOTrainer, Recipe, OverlayTrainer):
        trainer = object.__new__(kind)
        ray_trainer.init(lambda self, config: None, trainer, config)
        assert isinstance(trainer, OverlayTrainer) and isinstance(trainer, kind)
        assert type(trainer).init_workers is OverlayTrainer.init_workers
        assert kind is not Recipe or trainer.fit() == "of the recipe"
    assert settings.current().precision == "float32"


def test_configuration_of_verl_alone_gets_the_overlays_keys(active):
    """A user's own program builds verl's trainer from verl's file, and its configuration has no interpolations left."""
    active()
    verls = OmegaConf.load(main_ppo.verl_config_folder() / "ppo_trainer.yaml")
    given = OmegaConf.merge(verls, OmegaConf.from_dotlist(["actor_rollout_ref.model.path=/weights", *PUBLISHED]))
    seen = []
    ray_trainer.init(lambda self, config: seen.append(config), object.__new__(RayPPOTrainer), given)
    (config,) = seen
    assert settings.current().measure.output_dir == config.trainer.default_local_dir
    assert "overlay" not in given.actor_rollout_ref and "${" not in OmegaConf.to_yaml(config, resolve=False)


def test_the_driver_rejects_what_cannot_run_before_verl_builds_anything(active):
    config = compose("rehearsal", ["actor_rollout_ref.actor.megatron.grad_offload=true"])
    with pytest.raises(ConfigurationError, match="grad_offload=True and .*residency.enabled=true would both move"):
        ray_trainer.init(lambda self, config: pytest.fail("verl was called"), SimpleNamespace(), config)


def test_a_step_is_written_before_it_is_handed_on_and_published_behind(active):
    folder = active()
    order = []
    trainer = SimpleNamespace(
        global_steps=3, use_critic=False, use_reference_policy=False, log=lambda metrics: order.append(written())
    )
    group = SimpleNamespace(update_actor=None)
    trainer.actor_rollout_wg, trainer.reward_fn, trainer.val_reward_fn = group, None, None
    trainer.end_tokens = lambda: EndTokens((("tokenizer", (2,)),))
    trainer.config = compose("rehearsal", [])

    def written():
        return json.loads((folder / "metrics.jsonl").read_text())

    dress(trainer, [each for each in MIDDLEWARE if each.feature is MEASURE])
    trainer.log({"reward": 0.5})
    (record,) = order
    assert record["step"] == 3 and record["metrics"] == {"reward": 0.5}
    assert json.loads((folder / "events.jsonl").read_text())["event"] == "models_ready"
