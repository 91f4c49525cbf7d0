"""The modelled step as text and as figures: where it goes, and what bounds it next."""

from __future__ import annotations

from typing import Any

from post_training.plan.step_time.job import Cluster, StepJob
from post_training.plan.step_time.model import step_parts, step_rate
from post_training.report.flops import FORWARD_AND_BACKWARD, PEAK, forward_flops

_BAR, _SHOWN = 40, 5


def largest_parts(job: StepJob, cluster: Cluster) -> list[tuple[str, float]]:
    """What takes time in a step, largest first, as `stage: part` and seconds; nothing of less than 10 ms."""
    every = {
        f"{stage}: {part}": seconds
        for stage, parts in step_parts(job, cluster).items()
        for part, seconds in parts.items()
        if seconds >= 0.01
    }
    return sorted(every.items(), key=lambda item: -item[1])


def time_figures(job: StepJob, cluster: Cluster) -> dict[str, Any]:
    """Everything that the text says, for programs. Seconds; rates are tokens a second and card of two dies."""
    parts = step_parts(job, cluster)
    seconds = {stage: sum(each.values()) for stage, each in parts.items()}
    return {
        "modelled": True,
        "dies": cluster.dies,
        "step_s": sum(seconds.values()),
        "tokens_a_second_and_card": step_rate(job, cluster, seconds),
        "stages_s": seconds,
        "parts_s": parts,
    }


def describe_time(job: StepJob, cluster: Cluster) -> str:
    """The modelled step as text."""
    parts = step_parts(job, cluster)
    seconds = {stage: sum(each.values()) for stage, each in parts.items()}
    total = sum(seconds.values())
    dies = f"{cluster.dies} {'die' if cluster.dies == 1 else 'dies'}"
    lines = [f"modelled step, {dies}; no measurement, see docs/rollout.md"]
    for stage, value in seconds.items():
        lines.append(f"  {stage:<13}{value:>10.1f} s  {'#' * round(_BAR * value / total)}")
    lines.append(
        f"  {'step':<13}{total:>10.1f} s  {step_rate(job, cluster, seconds):.1f} tokens a second and card\n"
        "  where it goes, and so what is next to make faster:"
    )
    for name, value in largest_parts(job, cluster)[:_SHOWN]:
        lines.append(f"    {value:>9.1f} s {value / total:>5.0%}  {name}")
    work = FORWARD_AND_BACKWARD * job.sequences * forward_flops(job.model, job.prompt_tokens + job.response_tokens)
    share = work / seconds["update"] / cluster.dies / (PEAK.teraflops * 1e12)
    lines.append(f"  the update at {share:.0%} of {PEAK.teraflops:g} TFLOPS a die, without what is recomputed")
    return "\n".join(lines)
