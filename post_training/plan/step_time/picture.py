"""Draws the modelled step: its largest parts, and its stages on fewer and on more dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from post_training.plan.step_time.configured import MOST_DIES
from post_training.plan.step_time.job import Cluster, StepJob
from post_training.plan.step_time.model import STAGES, step_seconds
from post_training.plan.step_time.text import largest_parts
from post_training.report.palette import LIGHT_FRAME, stage_colour

_SHOWN = 8
_TIMES = (1 / 4, 1 / 2, 1, 2, 4)


def draw_time(job_on: Callable[[Cluster], StepJob], cluster: Cluster, path: Path) -> None:
    """Write an SVG with two panels; equal values give equal bytes.

    One panel has the largest parts of a step, of which the first is the next bottleneck. The other has the seconds of
    the stages on a quarter of the dies up to four times as many.

    Raises:
        OSError: the file cannot be written.
    """
    with mpl.rc_context({"svg.hashsalt": "step", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(10, 3.6), layout="constrained", facecolor=LIGHT_FRAME["ground"])
        parts, scaling = figure.subplots(1, 2, width_ratios=(3, 2))
        figure.suptitle("Modelled, not measured: seconds of a step")
        _draw_parts(parts, job_on(cluster), cluster)
        _draw_scaling(scaling, job_on, cluster)
        for axes in (parts, scaling):
            axes.spines[["top", "right"]].set_visible(False)
        FigureCanvasSVG(figure)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _draw_parts(axes: Axes, job: StepJob, cluster: Cluster) -> None:
    shown = largest_parts(job, cluster)[:_SHOWN]
    for place, (name, seconds) in enumerate(shown):
        axes.barh(place, seconds, color=stage_colour(name.split(":")[0]))
        axes.annotate(f"{seconds:.0f}", (seconds, place), (3, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.invert_yaxis()
    axes.set(title=f"largest parts on {cluster.dies} dies", xlabel="s")


def _draw_scaling(axes: Axes, job_on: Callable[[Cluster], StepJob], cluster: Cluster) -> None:
    sizes = sorted({dies for times in _TIMES if 1 <= (dies := int(cluster.dies * times)) <= MOST_DIES})
    steps = [step_seconds(job_on(Cluster(dies)), Cluster(dies)) for dies in sizes]
    base = [0.0] * len(sizes)
    for stage in STAGES:
        heights = [seconds[stage] for seconds in steps]
        if any(heights):
            axes.bar([str(dies) for dies in sizes], heights, bottom=base, color=stage_colour(stage), label=stage)
            base = [below + height for below, height in zip(base, heights, strict=True)]
    axes.set(title="the same batch on other clusters", xlabel="dies", ylabel="s")
    axes.legend(frameon=False, reverse=True)
