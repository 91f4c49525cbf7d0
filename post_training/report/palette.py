"""The colours of report.html, report.png and the other pictures; no other module defines a colour."""

from __future__ import annotations

from collections.abc import Mapping

LIGHT = (
    "#2f6db3", "#d97f1e", "#3f8f5f", "#b0413e", "#7a4fa3", "#8a6d3b", "#2a9d9d", "#9aa3af", "#c27ba0", "#a3b86c",
)  # fmt: skip
DARK = (
    "#6fa8e8", "#f0a657", "#6fc391", "#e57f7c", "#b48fdb", "#c7a86b", "#5fc9c9", "#7b8494", "#dba0bf", "#c3d68f",
)  # fmt: skip
"""The same colours for dark pages, in the order of `LIGHT`."""

LIGHT_FRAME: Mapping[str, str] = {
    "ground": "#ffffff", "panel": "#f7f8fa", "ink": "#1c2430", "faint": "#667085", "rule": "#e2e5ea",
    "good": "#237a4b", "bad": "#b3261e",
}  # fmt: skip
"""Background, text, lines and results, by the names of the page's CSS variables."""
DARK_FRAME: Mapping[str, str] = {
    "ground": "#14181f", "panel": "#1c222b", "ink": "#e4e8ee", "faint": "#98a2b3", "rule": "#323a46",
    "good": "#6fcf97", "bad": "#ff8a80",
}  # fmt: skip

PICTURE_STYLE: Mapping[str, str] = {
    "figure.facecolor": LIGHT_FRAME["ground"],
    "axes.facecolor": LIGHT_FRAME["ground"],
    "text.color": LIGHT_FRAME["ink"],
    "axes.labelcolor": LIGHT_FRAME["faint"],
    "xtick.labelcolor": LIGHT_FRAME["faint"],
    "ytick.labelcolor": LIGHT_FRAME["faint"],
    "axes.edgecolor": LIGHT_FRAME["faint"],
    "xtick.color": LIGHT_FRAME["faint"],
    "ytick.color": LIGHT_FRAME["faint"],
    "grid.color": LIGHT_FRAME["rule"],
}
"""matplotlib settings for a picture that looks like the light page."""

STAGE_COLOURS: Mapping[str, int] = {
    "rollout": 0, "old_log_prob": 4, "ref": 2, "values": 8, "reward": 3, "adv": 5, "update_critic": 9, "update": 1,
    "reshard": 6, "offload": 7, "other": 7,
}  # fmt: skip
"""Number of each stage's colour."""


def stage_colour(stage: str) -> str:
    """Return the colour of a stage in a picture on a white background."""
    return LIGHT[STAGE_COLOURS[stage]]
