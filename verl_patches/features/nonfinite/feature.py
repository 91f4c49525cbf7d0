"""The feature nonfinite: its configuration and its switch."""

from __future__ import annotations

from dataclasses import dataclass

from overlay import Feature


@dataclass(frozen=True)
class NonfiniteSettings:
    """Skip and count optimizer steps whose gradients hold inf or nan."""

    enabled: bool = True


NONFINITE = Feature(
    name="nonfinite",
    purpose="An optimizer step whose gradients contain inf or nan is skipped and counted.",
    section="actor_rollout_ref.overlay.nonfinite",
    settings=NonfiniteSettings,
)
