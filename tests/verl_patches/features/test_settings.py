import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_patches.features import settings
from verl_patches.features.settings import OverlaySettings, SettingsError


def node(**overlay):
    return OmegaConf.create(
        {"actor": {"recompute_old_log_prob": False}, "rollout": {"temperature": 0.9}, "overlay": overlay}
    )


def test_reads_every_section_and_verls_own_keys():
    read = OverlaySettings.from_config(
        node(residency={"enabled": False}, measure={"verify_weights": True, "output_dir": "/x"}, precision="float32")
    )
    assert read.residency.enabled is False and read.reshard.enabled is True
    assert read.measure.output_dir == "/x" and read.measure.verify_weights
    assert read.precision == "float32"
    assert read.recompute_old_log_prob is False and read.rollout_temperature == 0.9


def test_absent_node_means_defaults():
    assert OverlaySettings.from_config({}) == OverlaySettings()


def test_integer_temperature_is_a_float():
    assert OverlaySettings.from_config({"rollout": {"temperature": 1}}).rollout_temperature == 1.0


@pytest.mark.parametrize(
    ("overlay", "says"),
    [
        (
            {"residencyy": {}},
            "unknown key actor_rollout_ref.overlay.residencyy; allowed keys are alerts, .*did you mean residency",
        ),
        ({"residency": {"enable": True}}, "unknown key actor_rollout_ref.overlay.residency.enable; .*enabled"),
        ({"residency": True}, "actor_rollout_ref.overlay.residency must be a group of keys"),
        ({"residency": False}, "actor_rollout_ref.overlay.residency must be a group of keys"),
        (
            {"residency": {"enabled": "yes"}},
            "overlay.residency.enabled='yes' is invalid. Set it to a value of type bool",
        ),
        (
            {"reshard": {"bucket_bytes": True}},
            "overlay.reshard.bucket_bytes=True is invalid. Set it to a value of type int",
        ),
        ({"precision": "float16"}, "Set it to one of bfloat16, float32"),
        ({"rollout": {"expert_parallel_size": 0}}, "Set it to at least 1"),
        ({"rollout_temperature": 1.0}, "unknown key actor_rollout_ref.overlay.rollout_temperature"),
    ],
)
def test_bad_nodes_are_named(overlay, says):
    with pytest.raises(SettingsError, match=says):
        OverlaySettings.from_config(node(**overlay))


@given(st.text(min_size=1).filter(lambda name: name not in OverlaySettings.__dataclass_fields__))
def test_no_unknown_key_is_ever_accepted(name):
    with pytest.raises(SettingsError, match="unknown key"):
        OverlaySettings.from_config({"overlay": {name: 1}})


def test_everything_is_off_until_activated(monkeypatch):
    monkeypatch.setattr(settings, "_current", OverlaySettings.all_off())
    off = settings.current()
    features = (off.reshard, off.residency, off.dp_sync, off.temperature, off.nonfinite)
    assert not any(feature.enabled for feature in features) and off.recompute_old_log_prob
    chosen = OverlaySettings(precision="float32")
    settings.activate(chosen)
    assert settings.current() is chosen
