"""The feature prefork: its configuration and its switch. It has no patch: the entry point starts the template."""

from __future__ import annotations

from dataclasses import dataclass

from overlay import Feature


@dataclass(frozen=True)
class PreforkSettings:
    """Fork Ray workers from a process that imported the stack once."""

    enabled: bool = False


PREFORK = Feature(
    name="prefork",
    purpose="On a small machine without an NPU, Ray workers are forked from one process that imported the stack once.",
    section="actor_rollout_ref.overlay.prefork",
    settings=PreforkSettings,
    switch="actor_rollout_ref.overlay.prefork.enabled",
    is_on=lambda settings: settings.prefork.enabled,
)
