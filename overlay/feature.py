"""Features: each owns its typed configuration, its validation, its switch and its patches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic

from overlay.errors import DeclarationError

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # type checkers know it; at run time the standard library's is enough

    Settings = TypeVar("Settings", default=Any)
else:
    from typing import TypeVar

    Settings = TypeVar("Settings")

Check = Callable[[Mapping[str, Any], Any], None]


_settings_of_process: Callable[[], Any] | None = None


def read_settings_from(source: Callable[[], Any]) -> None:
    """Set the source of this process's settings, which turn features with a switch on or off."""
    global _settings_of_process
    _settings_of_process = source


def _always(settings: Any) -> bool:
    return True


@dataclass(frozen=True)
class Key:
    """A single configuration key of a feature, outside any section of its own.

    Args:
        name: the attribute of the run's settings that holds the value.
        path: the whole key.
        kind: a class or a `Literal`, which the value has to be.
        default: the value where the key is absent or null.
    """

    name: str
    path: str
    kind: Any
    default: Any


@dataclass(frozen=True, eq=False)
class Feature(Generic[Settings]):
    """Something that the overlay gives a run. Every patch refers to the one object of its feature.

    Args:
        name: a short identifier, unique among all features; `target@name` is the label of a patch.
        purpose: one sentence for a user.
        section: the key of its group in the composed configuration; empty if it has none of its own.
        settings: the frozen dataclass that the section is read into; fields, types and defaults are its keys.
        keys: further keys that it reads.
        switch: the key by which a user turns it off; by default the section's `enabled`, and empty if it has none: then
            the feature is always on.
        off: the value of a switch inside the section that turns the feature off.
        is_on: tells from the run's settings whether the feature is on, by default the section's `enabled`; its patches
            are not called while it is off. It requires a switch; if that is upstream's own key, `keys` lists it too.
        checks: called on the driver, with the composed configuration and the run's settings, if the feature is on; each
            raises ConfigurationError in one sentence that names the keys and the remedy.
    """

    name: str
    purpose: str
    section: str = ""
    settings: type[Settings] | None = None
    keys: tuple[Key, ...] = ()
    switch: str = ""
    off: Any = False
    is_on: Callable[[Any], bool] = field(default=_always, repr=False)
    checks: tuple[Check, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        section: Any = self.settings
        if section is not None and "enabled" in {each.name for each in fields(section)}:
            object.__setattr__(self, "switch", self.switch or f"{self.section}.enabled")
            if self.is_on is _always:
                object.__setattr__(self, "is_on", lambda settings: getattr(settings, self.field).enabled)
        faults = [
            (not self.name.isidentifier(), "its name is not an identifier"),
            (not self.purpose.strip(), "it has no purpose"),
            (bool(self.section) != (self.settings is not None), "a section and a dataclass of settings go together"),
            (bool(self.switch) != self.can_be_off, "a switch and is_on go together"),
        ]
        for wrong, fault in faults:
            if wrong:
                raise DeclarationError(f"feature {self.name!r}: {fault}")

    @property
    def can_be_off(self) -> bool:
        """Whether the settings decide if its patches are called."""
        return self.is_on is not _always

    def is_active(self) -> bool:
        """Whether this process's settings turn it on; without settings only features that are always on are active."""
        if not self.can_be_off:
            return True
        return _settings_of_process is not None and self.is_on(_settings_of_process())

    @property
    def field(self) -> str:
        """The attribute of the run's settings that holds the section: its last name."""
        return self.section.rpartition(".")[2]

    def of(self, settings: Any) -> Settings:
        """Return its section of the run's settings."""
        return getattr(settings, self.field)

    def current(self) -> Settings:
        """Return its section in the settings of this process; the section is turned off if there are none yet."""
        return self.turned_off() if _settings_of_process is None else self.of(_settings_of_process())

    def turned_off(self) -> Settings:
        """Return the section with the switch at `off` if the switch is one of its keys, otherwise with its defaults."""
        assert self.settings is not None, "asked of features with a section"
        place, _, name = self.switch.rpartition(".")
        return self.settings(**{name: self.off} if place == self.section else {})

    def check(self, config: Mapping[str, Any], settings: Any) -> None:
        """Check the feature, if it is on, against the rest of the configuration.

        Raises:
            ConfigurationError: a combination that cannot run.
        """
        if self.is_on(settings):
            for check in self.checks:
                check(config, settings)
