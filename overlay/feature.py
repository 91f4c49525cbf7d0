"""What patches belong to: a feature owns its typed configuration, its validation, its switch and its patches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from overlay.errors import DeclarationError

Check = Callable[[Mapping[str, Any], Any], None]


def _always(settings: Any) -> bool:
    return True


@dataclass(frozen=True, eq=False)
class Feature:
    """Something that the overlay gives a run. Every patch refers to the one object of its feature.

    Args:
        name: a short identifier, unique among all features; `target@name` is the label of a patch.
        purpose: one sentence for a user.
        section: the key of its group in the composed configuration; empty if it has none of its own.
        settings: the frozen dataclass that the section is read into; fields, types and defaults are its keys.
        switch: the key by which a user turns it off; empty if it is always on.
        is_on: says of the run's settings whether it is on; left out where the switch is a key of upstream's own, which
            the patches read from what upstream hands them.
        checks: called on the driver, with the composed configuration and the run's settings, if the feature is on; each
            raises ConfigurationError in one sentence that names the keys and the remedy.
    """

    name: str
    purpose: str
    section: str = ""
    settings: type | None = None
    switch: str = ""
    is_on: Callable[[Any], bool] = field(default=_always, repr=False)
    checks: tuple[Check, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        faults = [
            (not self.name.isidentifier(), "its name is no identifier"),
            (not self.purpose.strip(), "it does not say its purpose"),
            (bool(self.section) != (self.settings is not None), "a section and a dataclass of settings go together"),
            (not self.switch and self.is_on is not _always, "is_on without a switch"),
        ]
        for wrong, fault in faults:
            if wrong:
                raise DeclarationError(f"feature {self.name!r}: {fault}")

    def check(self, config: Mapping[str, Any], settings: Any) -> None:
        """Hold the feature, if it is on, against the rest of the configuration.

        Raises:
            ConfigurationError: a combination that cannot run.
        """
        if self.is_on(settings):
            for check in self.checks:
                check(config, settings)
