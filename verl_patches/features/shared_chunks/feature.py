"""The feature shared_chunks: its configuration and its switch."""

from __future__ import annotations

from dataclasses import dataclass

from overlay import Feature


@dataclass(frozen=True)
class SharedChunksSettings:
    """Put each distinct part of a batch into Ray's store once, instead of once for every worker that takes it."""

    enabled: bool = True


SHARED_CHUNKS = Feature(
    name="shared_chunks",
    purpose="Workers that need the same part of a batch share one copy of it, so the last one starts sooner.",
    section="actor_rollout_ref.overlay.shared_chunks",
    settings=SharedChunksSettings,
)
