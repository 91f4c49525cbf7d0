"""The feature dp_sync: its configuration and its switch."""

from __future__ import annotations

from dataclasses import dataclass

from overlay import Feature


@dataclass(frozen=True)
class DpSyncSettings:
    """Let rollout ranks agree over the device's collectives instead of gloo on the host."""

    enabled: bool = True


DP_SYNC = Feature(
    name="dp_sync",
    purpose="Data-parallel rollout ranks agree on every decode step over the device's collectives, not on the host.",
    section="actor_rollout_ref.overlay.dp_sync",
    settings=DpSyncSettings,
    switch="actor_rollout_ref.overlay.dp_sync.enabled",
    is_on=lambda settings: settings.dp_sync.enabled,
)
