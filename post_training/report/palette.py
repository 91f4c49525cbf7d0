"""The colours of pages and pictures: a stage has the same one wherever it is drawn."""

from __future__ import annotations

from collections.abc import Mapping

LIGHT = (
    "#2f6db3", "#d97f1e", "#3f8f5f", "#b0413e", "#7a4fa3", "#8a6d3b", "#2a9d9d", "#9aa3af", "#c27ba0", "#a3b86c",
)  # fmt: skip
DARK = (
    "#6fa8e8", "#f0a657", "#6fc391", "#e57f7c", "#b48fdb", "#c7a86b", "#5fc9c9", "#7b8494", "#dba0bf", "#c3d68f",
)  # fmt: skip
"""On dark pages, in the order of `LIGHT`."""

STAGE_COLOURS: Mapping[str, int] = {
    "rollout": 0, "old_log_prob": 4, "ref": 2, "values": 8, "reward": 3, "adv": 5, "update_critic": 9, "update": 1,
    "reshard": 6, "offload": 7, "other": 7,
}  # fmt: skip
"""Which colour each stage of a step has."""


def stage_colour(stage: str) -> str:
    """The colour of a stage in a picture on white ground."""
    return LIGHT[STAGE_COLOURS[stage]]
