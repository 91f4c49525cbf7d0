"""Every feature is found, and its one object describes its section and its switch correctly."""

import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from overlay.configuration import defaults
from overlay.declaration import patches_of
from overlay.discovery import load
from overlay.pins import Pins
from verl_patches.features.catalogue import FEATURES
from verl_patches.features.dynamic_sampling.feature import DYNAMIC_SAMPLING
from verl_patches.features.settings import NODE, OverlaySettings
from verl_patches.trainer.main_ppo import REPOSITORY, compose
from verl_patches.trainer.ppo.middleware import MIDDLEWARE

PATCH_PACKAGES = Pins.read().patch_packages()
WITH_SECTION = [pytest.param(feature, id=feature.name) for feature in FEATURES if feature.settings]
SWITCHED = [pytest.param(feature, id=feature.name) for feature in FEATURES if feature.switch]
# Values of the switches that are not booleans: off, on.
VALUES = {
    "rollout_expert_parallel": ("1", "4"),
    "precision": ("bfloat16", "float32"),
    "onpolicy": ("true", "false"),
    "direct_loading": ("null", "folder"),
    "mindspeed": ("off", "on"),
    "kv_cache_size": ("null", "256"),
    "rollout_seed": ("null", "7"),
}


def test_every_feature_that_a_patch_refers_to_is_found():
    assert {patch.feature for patch in load(PATCH_PACKAGES)} <= set(FEATURES)
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)


@pytest.mark.parametrize("feature", WITH_SECTION)
def test_a_section_is_where_the_feature_says(feature):
    name = feature.section.removeprefix(f"{NODE}.")
    assert type(getattr(OverlaySettings(), name)) is feature.settings
    composed = OmegaConf.select(compose("rehearsal", []), feature.section)
    assert set(composed) == set(defaults(feature.settings)), "the configuration shows every key"
    assert feature.settings.__dataclass_params__.frozen, "settings are checked once and do not change behind that"


@pytest.mark.parametrize("feature", SWITCHED)
def test_the_switch_is_what_turns_it_on(feature):
    off, on = VALUES.get(feature.name, ("false", "true"))
    for value, expected in ((off, False), (on, True)):
        config = compose("rehearsal", [f"{feature.switch}={value}"])
        assert feature.is_on(OverlaySettings.from_config(config.actor_rollout_ref, config)) is expected
    of_the_loop = {each.feature for each in MIDDLEWARE} | {DYNAMIC_SAMPLING}
    assert patches_of(feature) or feature in of_the_loop


FEATURE = """
from dataclasses import dataclass
from overlay import Feature, Key

NODE = "actor_rollout_ref.overlay"


@dataclass(frozen=True)
class GreetingSettings:
    enabled: bool = True
    times: int = 2


GREETING = Feature(
    name="greeting",
    purpose="a test",
    section=f"{NODE}.greeting",
    settings=GreetingSettings,
    keys=(Key("loud", f"{NODE}.loud", bool, False),),
    switch=f"{NODE}.greeting.enabled",
    is_on=lambda settings: settings.greeting.enabled,
)
"""
PATCH = """
from mindspeed_patches.features.greeting.feature import GREETING
from overlay import wrap
from verl_patches.features import settings


@wrap("mindspeed.greeting:greet", feature=GREETING, why="a test", upstream="not forwarded: a test", remove_when="never")
def greet(upstream, name):
    return [upstream(name)] * settings.current().greeting.times
"""
PROGRAM = """
import overlay
overlay.activate()
from mindspeed.greeting import greet
from verl_patches.features import settings
from verl_patches.trainer.main_ppo import compose

key, said = "actor_rollout_ref.overlay.greeting", [greet("you")]
for enabled in ("false", "true"):
    config = compose("rehearsal", [f"{key}.enabled={enabled}", f"{key}.times=3"])
    settings.activate(settings.OverlaySettings.from_config(config.actor_rollout_ref))
    said.append(greet("you"))
print(said, settings.current().loud, settings.OverlaySettings.all_off().greeting.enabled)
"""


def test_a_feature_is_one_file_of_settings_and_its_patches(tmp_path):
    """The feature is in a separate folder, for an upstream that is not installed here; it is run off and on."""
    for name, text in {
        "mindspeed/__init__.py": "",
        "mindspeed/core/tensor_parallel/cross_entropy.py": "",  # the project's own patch looks for it
        "mindspeed/greeting.py": "def greet(name):\n    return f'hello {name}'\n",
        "mindspeed_patches/features/greeting/feature.py": FEATURE,
        "mindspeed_patches/greeting.py": PATCH,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    said = ["hello you", "hello you", ["hello you"] * 3]
    assert result.stdout == f"{said} False False\n", result.stderr


def test_all_off_means_every_switch():
    off = OverlaySettings.all_off()
    assert [feature.name for feature in FEATURES if feature.switch.startswith(NODE) and feature.is_on(off)] == []
    assert any(feature.is_on(OverlaySettings()) for feature in FEATURES if feature.switch)
