"""What a feature says of itself, how its configuration is read, and when its checks are made."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal

import pytest

from overlay import ConfigurationError, ConflictError, DeclarationError, Feature, SettingsError, wrap
from overlay.configuration import defaults, read_section
from overlay.discovery import load_features
from overlay.ordering import make_plan
from tests.overlay.conftest import METADATA


@dataclass(frozen=True)
class Inner:
    size: int = field(default=4, metadata={"at_least": 1})


@dataclass(frozen=True)
class Section:
    enabled: bool = True
    ratio: float = 0.5
    mode: Literal["fast", "exact"] = "fast"
    inner: Inner = Inner()


def off(config, settings):
    raise ConfigurationError("one.enabled and two.enabled exclude each other; switch one of them off")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"name": "no identifier"}, "its name is no identifier"),
        ({"purpose": " "}, "it does not say its purpose"),
        ({"section": "one"}, "a section and a dataclass of settings go together"),
        ({"settings": Section}, "a section and a dataclass of settings go together"),
        ({"is_on": lambda settings: True}, "a switch and is_on go together"),
        ({"switch": "one.enabled"}, "a switch and is_on go together"),
    ],
)
def test_an_incomplete_feature_is_refused(keys, says):
    with pytest.raises(DeclarationError, match=says):
        Feature(**{"name": "one", "purpose": "a test", **keys})


def test_a_patch_belongs_to_a_feature_object():
    with pytest.raises(DeclarationError, match="feature must be a Feature object, not 'one'"):
        wrap("acme:f", **{**METADATA, "feature": "one"})


def test_two_features_of_one_name_conflict(bench):
    patches = [bench.patch("wrap", f"acme:{name}", print, feature=Feature("one", "a test")) for name in "fg"]
    with pytest.raises(ConflictError, match="belong to two Feature objects of one name"):
        make_plan(patches)


def test_its_checks_are_made_only_while_it_is_on():
    feature = Feature("one", "a test", switch="one.enabled", is_on=lambda settings: settings.one, checks=(off,))
    feature.check({}, SimpleNamespace(one=False))
    with pytest.raises(ConfigurationError, match="switch one of them off"):
        feature.check({}, SimpleNamespace(one=True))


def test_a_section_is_read_with_its_defaults():
    assert Section(**read_section(Section, {}, "one")) == Section()
    given = {"enabled": False, "ratio": 1, "mode": "exact", "inner": {"size": 1}}
    assert Section(**read_section(Section, given, "one")) == Section(False, 1.0, "exact", Inner(1))
    assert defaults(Inner) == {"size": "4"}


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (
            {"enable": True},
            "unknown key one.enable; allowed keys are enabled, ratio, mode, inner; did you mean enabled\\?$",
        ),
        ({"colour": True}, "unknown key one.colour; allowed keys are enabled, ratio, mode, inner$"),
        ({"inner": {"sizes": 1}}, "unknown key one.inner.sizes; allowed keys are size; did you mean size\\?$"),
        ({"enabled": "yes"}, "one.enabled must be of type bool, not 'yes'"),
        ({"ratio": True}, "one.ratio must be of type float, not True"),
        ({"mode": "slow"}, "one.mode is 'slow'; choose one of fast, exact"),
        ({"inner": {"size": 0}}, "one.inner.size is 0 and must be at least 1"),
        ({"inner": 3}, "one.inner must be a group of keys"),
        (3, "one must be a group of keys"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(node, says):
    with pytest.raises(SettingsError, match=says):
        read_section(Section, node, "one")


def test_features_are_found_by_their_files(bench):
    bench.write(
        {
            "acme_patches/features/one.py": "from overlay import Feature\n\nONE = Feature('one', 'a test')\n",
            "acme_patches/features/two.py": "from acme_patches.features.one import ONE\nimport overlay\n"
            "TWO = overlay.Feature('two', 'a test')\n",
            "acme_patches/features/no.py": "raise AssertionError('it declares nothing')",
        }
    )
    assert [feature.name for feature in load_features(["acme_patches"])] == ["one", "two"]
