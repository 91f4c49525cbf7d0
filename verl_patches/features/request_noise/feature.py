"""The feature request_noise: its configuration and its switch."""

from __future__ import annotations

from dataclasses import dataclass

from overlay import Feature


@dataclass(frozen=True)
class RequestNoiseSettings:
    """Let every request of a rollout draw random numbers of its own, so that what it samples depends neither on its
    neighbours nor on how prompts are cut."""

    enabled: bool = False


REQUEST_NOISE = Feature(
    name="request_noise",
    purpose="A request's samples depend neither on the requests beside it nor on how its prompt is split.",
    section="actor_rollout_ref.overlay.request_noise",
    settings=RequestNoiseSettings,
)
