"""Every feature is in the catalogue, and its one object says the truth about its section and its switch."""

import pytest
from omegaconf import OmegaConf

from overlay.configuration import defaults
from overlay.declaration import patches_of
from overlay.discovery import load, load_features
from overlay.pins import Pins
from verl_patches.features.catalogue import FEATURES
from verl_patches.features.settings import NODE, OverlaySettings
from verl_patches.trainer.main_ppo import compose

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


def test_the_catalogue_holds_every_feature_and_every_patch_refers_to_one():
    assert set(FEATURES) == set(load_features(ROOMS)) and len(FEATURES) == len(set(FEATURES))
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


def test_all_off_means_every_switch():
    off = OverlaySettings.all_off()
    assert [feature.name for feature in FEATURES if feature.switch.startswith(NODE) and feature.is_on(off)] == []
    assert any(feature.is_on(OverlaySettings()) for feature in FEATURES if feature.switch)
