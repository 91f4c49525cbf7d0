"""The feature tracking: its configuration and its switch."""

from __future__ import annotations

from dataclasses import dataclass

from overlay import Feature


@dataclass(frozen=True)
class TrackingSettings:
    """The trackers of `trainer.logger` go on with their runs after a resume, say how a run ended, stay offline where
    they have no login, are dropped with one warning where they fail, and get no secrets."""

    enabled: bool = True


TRACKING = Feature(
    name="tracking",
    purpose="Trackers go on with their own curves after a resume, and know how a run ended.",
    section="actor_rollout_ref.overlay.tracking",
    settings=TrackingSettings,
)
