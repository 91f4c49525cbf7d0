"""The feature tracking: its configuration and its switch."""

from __future__ import annotations

from dataclasses import dataclass

from overlay import Feature


@dataclass(frozen=True)
class TrackingSettings:
    """The trackers of `trainer.logger` continue their runs after a resume, record how a run ended and get no secrets.

    A tracker without a login stays offline. One that fails is dropped with a warning.
    """

    enabled: bool = True


TRACKING = Feature(
    name="tracking",
    purpose="Trackers continue their own curves after a resume, and record how a run ended.",
    section="actor_rollout_ref.overlay.tracking",
    settings=TrackingSettings,
)
