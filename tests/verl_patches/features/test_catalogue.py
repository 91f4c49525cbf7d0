"""Every feature is found, and its one object says the truth about its section and its switch."""

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
from verl_patches.features.settings import NODE, OverlaySettings
from verl_patches.trainer.main_ppo import REPOSITORY, compose

ROOMS = Pins.read().rooms()
WITH_SECTION = [pytest.param(feature, id=feature.name) for feature in FEATURES if feature.settings]
SWITCHED_BY_US = [
    pytest.param(feature, id=feature.name)
    for feature in FEATURES
    if feature.switch.startswith((NODE, "actor_rollout_ref.actor"))
]
# What a switch is set to where it is no boolean: off, on.
VALUES = {
    "rollout_expert_parallel": ("1", "4"),
    "precision": ("bfloat16", "float32"),
    "onpolicy": ("true", "false"),
    "direct_loading": ("null", "folder"),
    "mindspeed": ("off", "on"),
}


def test_every_feature_that_a_patch_refers_to_is_found():
    assert {patch.feature for patch in load(ROOMS)} <= set(FEATURES)
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)


@pytest.mark.parametrize("feature", WITH_SECTION)
def test_a_section_is_where_the_feature_says(feature):
    name = feature.section.removeprefix(f"{NODE}.")
    assert type(getattr(OverlaySettings(), name)) is feature.settings
    composed = OmegaConf.select(compose("rehearsal", []), feature.section)
    assert set(composed) == set(defaults(feature.settings)), "the configuration shows every key"


@pytest.mark.parametrize("feature", SWITCHED_BY_US)
def test_the_switch_is_what_turns_it_on(feature):
    off, on = VALUES.get(feature.name, ("false", "true"))
    for value, expected in ((off, False), (on, True)):
        config = compose("rehearsal", [f"{feature.switch}={value}"])
        assert feature.is_on(OverlaySettings.from_config(config.actor_rollout_ref)) is expected
    assert patches_of(feature)


def test_a_feature_in_another_folder_brings_its_keys_along(tmp_path):
    folder = tmp_path / "verl_patches" / "features" / "greeting"
    folder.mkdir(parents=True)
    (folder / "feature.py").write_text(
        "from dataclasses import dataclass\n"
        "from overlay import Feature, Key\n\n\n"
        "@dataclass(frozen=True)\n"
        "class GreetingSettings:\n"
        "    enabled: bool = True\n"
        "    times: int = 2\n\n\n"
        "NODE = 'actor_rollout_ref.overlay'\n"
        "GREETING = Feature(\n"
        "    'greeting', 'a test', f'{NODE}.greeting', GreetingSettings, (Key('loud', f'{NODE}.loud', bool, False),),\n"
        "    f'{NODE}.greeting.enabled', is_on=lambda settings: settings.greeting.enabled,\n"
        ")\n"
    )
    program = (
        "from verl_patches.features.settings import OverlaySettings\n"
        "from verl_patches.trainer.main_ppo import compose\n"
        "config = compose('rehearsal', ['actor_rollout_ref.overlay.greeting.times=3'])\n"
        "chosen = OverlaySettings.from_config(config.actor_rollout_ref)\n"
        "print(chosen.greeting, chosen.loud, OverlaySettings.all_off().greeting.enabled)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    result = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert result.stdout == "GreetingSettings(enabled=True, times=3) False False\n", result.stderr


def test_all_off_means_every_switch():
    off = OverlaySettings.all_off()
    assert [feature.name for feature in FEATURES if feature.switch.startswith(NODE) and feature.is_on(off)] == []
    assert any(feature.is_on(OverlaySettings()) for feature in FEATURES if feature.switch)
