"""A feature's declaration, how its configuration is read, and when its checks run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal

import pytest

from overlay import ConfigurationError, ConflictError, DeclarationError, Feature, SettingsError, feature, wrap
from overlay.configuration import checked, defaults, read_section
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
        ({"name": "no identifier"}, "its name is not an identifier"),
        ({"purpose": " "}, "it has no purpose"),
        ({"section": "one"}, "a section and a dataclass of settings go together"),
        ({"settings": Section}, "a section and a dataclass of settings go together"),
        ({"is_on": lambda settings: True}, "a switch and is_on go together"),
        ({"switch": "one.enabled"}, "a switch and is_on go together"),
    ],
)
def test_an_incomplete_feature_rejected(keys, says):
    with pytest.raises(DeclarationError, match=says):
        Feature(**{"name": "one", "purpose": "a test", **keys})


def test_a_patch_belongs_to_a_feature_object():
    with pytest.raises(DeclarationError, match="feature must be a Feature object, not 'one'"):
        wrap("acme:f", **{**METADATA, "feature": "one"})


def test_two_features_of_one_name_conflict(bench):
    patches = [bench.patch("wrap", f"acme:{name}", print, feature=Feature("one", "a test")) for name in "fg"]
    with pytest.raises(ConflictError, match="belong to two Feature objects with one name"):
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
        ({"enabled": "yes"}, "one.enabled='yes' is invalid. Set it to a value of type bool"),
        ({"ratio": True}, "one.ratio=True is invalid. Set it to a value of type float"),
        ({"mode": "slow"}, "one.mode='slow' is invalid. Set it to one of fast, exact"),
        ({"inner": {"size": 0}}, "one.inner.size=0 is invalid. Set it to at least 1"),
        ({"inner": 3}, "one.inner must be a group of keys"),
        ({"inner": ""}, "one.inner must be a group of keys, not ''"),
        ({"inner": 0}, "one.inner must be a group of keys, not 0"),
        (3, "one must be a group of keys"),
    ],
)
def test_a_wrong_value_rejected_with_its_key(node, says):
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


@dataclass(frozen=True)
class Lists:
    sizes: Sequence = field(default_factory=lambda: [1, 2])
    names: Mapping = field(default_factory=dict)
    count: int = field(default=3, metadata={"at_least": 0})
    inner: Inner = field(default_factory=Inner)


def test_defaults_are_written_as_a_configuration_has_them():
    assert defaults(Lists) == {"sizes": "[1, 2]", "names": "{}", "count": "3", "inner": '{"size": 4}'}
    assert defaults(Section) == {"enabled": "true", "ratio": "0.5", "mode": '"fast"', "inner": '{"size": 4}'}


def test_null_is_the_default_and_fields_from_elsewhere_are_not_asked_for():
    read = read_section(Lists, {"sizes": None, "count": 0, "inner": None}, "one", elsewhere=["names"])
    assert read == {"sizes": [1, 2], "count": 0, "inner": Inner()}
    with pytest.raises(SettingsError, match="unknown key one.names; allowed keys are sizes, count, inner$"):
        read_section(Lists, {"names": {}}, "one", elsewhere=["names"])
    with pytest.raises(SettingsError, match="unknown key one.a; "):
        read_section(Lists, {"b": 1, "a": 1}, "one")


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        (5, Sequence, "k=5 is invalid. Set it to a value of type list"),
        ([1], Mapping, r"k=\[1\] is invalid. Set it to a value of type group of keys"),
        (True, int, "k=True is invalid. Set it to a value of type int"),
        (1.5, int, "k=1.5 is invalid. Set it to a value of type int"),
        (1, bool, "k=1 is invalid. Set it to a value of type bool"),
        ("1", float, "k='1' is invalid. Set it to a value of type float"),
    ],
)
def test_a_value_of_another_kind_rejected(value, kind, says):
    with pytest.raises(SettingsError, match=says):
        checked(value, kind, "k")


def test_a_value_of_its_kind_stays_and_a_whole_number_serves_as_a_float():
    assert checked(True, bool, "k") is True and checked(2, int, "k") == 2 and checked([1], Sequence, "k") == [1]
    taken = checked(2, float, "k")
    assert taken == 2.0 and isinstance(taken, float)


def test_a_feature_names_its_place_and_what_turns_it_off():
    def made(**keys) -> Feature:
        return Feature("one", "a test", is_on=lambda settings: settings.on, **keys)

    inside = made(section="run.part", settings=Section, switch="run.part.enabled")
    assert (inside.field, inside.turned_off()) == ("part", Section(enabled=False))
    by_value = made(section="part", settings=Section, switch="part.mode", off="exact")
    assert (by_value.field, by_value.turned_off()) == ("part", Section(mode="exact"))
    assert made(section="run.part", settings=Section, switch="run.enabled").turned_off() == Section()


def test_enabled_of_a_section_is_its_switch(monkeypatch):
    made = Feature("one", "a test", section="run.part", settings=Section)
    assert (made.switch, made.can_be_off, made.turned_off()) == ("run.part.enabled", True, Section(enabled=False))
    also = Feature("two", "a test", section="run.part", settings=Section, is_on=lambda settings: settings.more)
    assert (also.switch, also.is_on(SimpleNamespace(more=True))) == ("run.part.enabled", True)
    assert not Feature("three", "a test", section="run.size", settings=Inner).can_be_off
    monkeypatch.setattr(feature, "_settings_of_process", None)
    assert made.current() == Section(enabled=False) and not made.is_active()
    for enabled in (True, False):
        section = Section(enabled, 0.25)
        feature.read_settings_from(lambda section=section: SimpleNamespace(part=section))
        assert made.current() is section and made.is_active() is enabled


def test_without_settings_only_what_is_always_on_is_active(monkeypatch):
    always, some = Feature("one", "a test"), Feature("two", "a test", switch="on", is_on=lambda settings: settings.on)
    monkeypatch.setattr(feature, "_settings_of_process", None)
    assert always.is_active() and not some.is_active() and some.can_be_off and not always.can_be_off
    for on in (True, False):
        feature.read_settings_from(lambda on=on: SimpleNamespace(on=on))
        assert always.is_active() and some.is_active() is on
