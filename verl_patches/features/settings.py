"""The overlay's typed configuration and its active copy in this process.

The Hydra node is `actor_rollout_ref.overlay`; verl passes `config.actor_rollout_ref` to every worker, and so to every
process. Worker adapters call `activate` once. The engine checks these settings at every call to find whether a patch's
feature is on, and patches read other values from `current()`. Before activation, every feature with a switch is off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from overlay import DeclarationError, Key, SettingsError, read_settings_from
from overlay.configuration import checked, read_section
from verl_patches.features.catalogue import FEATURES

__all__ = ["NODE", "SET_ELSEWHERE", "OverlaySettings", "SettingsError", "activate", "current", "overlay_defaults"]

_ROOT = "actor_rollout_ref"
NODE = f"{_ROOT}.overlay"
_BESIDE = tuple(key for feature in FEATURES for key in feature.keys if not key.path.startswith(f"{NODE}."))
SET_ELSEWHERE = tuple(key.name for key in _BESIDE)
"""Fields whose keys lie outside the overlay's node, among verl's own keys."""


class OverlaySettings:
    """All settings of the overlay's features: a field for the section of each feature, named as the last part of the
    section, and a field for each other key."""

    if TYPE_CHECKING:  # the fields are those of the features that are found
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def from_config(cls, config: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> OverlaySettings:
        """Read `config` = verl's `actor_rollout_ref` node (a mapping, such as a DictConfig).

        Args:
            config: the node.
            job: the whole configuration, which only the driver has; without it, keys outside verl's node, which only
                concern the driver, have their defaults.

        Raises:
            SettingsError: an unknown key under `overlay`, or a value of the wrong kind.
        """
        overlay = config.get("overlay")
        values = read_section(cls, {} if overlay is None else overlay, NODE, elsewhere=SET_ELSEWHERE)
        return cls(**values, **{key.name: _read(key, config, job) for key in _BESIDE})

    @classmethod
    def all_off(cls) -> OverlaySettings:
        """Return the settings before activation: every feature with a switch is off."""
        return cls(**{feature.field: feature.turned_off() for feature in FEATURES if feature.settings})


def overlay_defaults() -> dict[str, Any]:
    """Return the overlay's node with every key at its default, in the form of a configuration file."""
    values = {name: value for name, value in asdict(OverlaySettings()).items() if name not in SET_ELSEWHERE}
    return {_ROOT: {"overlay": values}}


def _read(key: Key, config: Mapping[str, Any], job: Mapping[str, Any] | None) -> Any:
    """Read a key that lies outside the overlay's node, in verl's node or in the rest of the job."""
    path = key.path.removeprefix(f"{_ROOT}.")
    value: Any = job if path == key.path else config
    for name in path.split("."):
        value = None if value is None else value.get(name)
    return key.default if value is None else checked(value, key.kind, key.path)


def _declared_fields() -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type and default of every field."""
    for feature in FEATURES:
        if feature.settings:
            yield feature.field, feature.settings, field(default_factory=feature.settings)
        for key in feature.keys:
            yield key.name, key.kind, field(default=key.default)


def _give_fields(cls: type) -> None:
    for name, kind, default in _declared_fields():
        if name in cls.__annotations__:
            raise DeclarationError(f"two features have settings named {name!r}")
        cls.__annotations__[name] = kind
        setattr(cls, name, default)
    dataclass(frozen=True)(cls)


_give_fields(OverlaySettings)
_current = OverlaySettings.all_off()


def activate(settings: OverlaySettings) -> None:
    """Activate `settings` in this process."""
    global _current
    _current = settings


def current() -> OverlaySettings:
    """Return the active settings of this process."""
    return _current


read_settings_from(lambda: current())
