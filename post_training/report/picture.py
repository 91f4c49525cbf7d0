"""Draws a run: the reward of each step, and its seconds by stage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from post_training.report.metrics import REWARD, SPREAD_OVER_OTHERS, STAGES, STEP_SECONDS, LoggedStep, ReportError
from post_training.report.palette import LIGHT, PICTURE_STYLE, stage_colour
from post_training.report.summary import REWARD_WINDOW, moving_means

_CURVE_COLOUR = LIGHT[0]
# 110 dots per inch are readable in a browser and in a README.
_DOTS_PER_INCH = 110


@mpl.rc_context(dict[Any, Any](PICTURE_STYLE))  # around all of it: matplotlib makes ticks when the picture is saved
def draw(records: Sequence[LoggedStep], title: str, path: Path) -> None:
    """Write a PNG with two panels over the steps: mean reward, and stacked seconds by stage.

    Raises:
        ReportError: there is no step to draw.
    """
    if not records:
        raise ReportError("The run has not finished a step yet: there is nothing to draw.")
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    reward_axes, time_axes = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title)
    _draw_rewards(reward_axes, records)
    _draw_stages(time_axes, records)
    time_axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in (reward_axes, time_axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=_DOTS_PER_INCH, format="png")


def _draw_rewards(axes: Axes, records: Sequence[LoggedStep]) -> None:
    known = [(record.step, value) for record in records if (value := record.metrics.get(REWARD)) is not None]
    steps, rewards = [step for step, _ in known], [reward for _, reward in known]
    axes.plot(steps, rewards, "o", color=_CURVE_COLOUR, alpha=0.4, markersize=4, label="step")
    label = f"mean of {REWARD_WINDOW} steps"
    axes.plot(steps, moving_means(rewards, REWARD_WINDOW), color=_CURVE_COLOUR, linewidth=2, label=label)
    axes.set_ylabel("mean reward")
    axes.set_ylim(0, max([1.0, *rewards]) * 1.02)
    axes.legend(loc="lower right", frameon=False)


def _draw_stages(axes: Axes, records: Sequence[LoggedStep]) -> None:
    steps = [record.step for record in records]
    stages = [record.stage_seconds() for record in records]
    base = [0.0] * len(records)
    for stage in (name for name in STAGES if name != SPREAD_OVER_OTHERS):
        heights = [seconds[stage] or 0.0 for seconds in stages]
        if any(heights):
            axes.bar(steps, heights, bottom=base, width=0.85, color=stage_colour(stage), label=stage)
            base = [low + height for low, height in zip(base, heights, strict=True)]
    totals = [record.metrics.get(STEP_SECONDS) or 0.0 for record in records]
    rest = [max(0.0, total - used) for total, used in zip(totals, base, strict=True)]
    if any(rest):
        axes.bar(steps, rest, bottom=base, width=0.85, color=stage_colour("other"), label="other")
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    if axes.containers:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
