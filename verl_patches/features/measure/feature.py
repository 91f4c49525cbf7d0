"""The feature measure: its configuration. It only records, and changes nothing that a run computes."""

from __future__ import annotations

from dataclasses import dataclass

from overlay import Feature


@dataclass(frozen=True)
class MeasureSettings:
    """Measurements and files of a run. With an empty `output_dir`, no file is written."""

    verify_weights: bool = False
    output_dir: str = ""


MEASURE = Feature(
    name="measure",
    purpose="A run records time, device memory, collectives and the exactness of the rollout's weights by phase.",
    section="actor_rollout_ref.overlay.measure",
    settings=MeasureSettings,
)
