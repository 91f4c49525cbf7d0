"""Formats the modelled step as text and as numbers: its stages, its largest parts, and gaps in published numbers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from post_training.plan.step_time.job import SPREAD, Cluster, StepJob
from post_training.plan.step_time.model import step_parts, step_rate
from post_training.plan.step_time.published import QWEN3_235B, given
from post_training.plan.step_time.rollout import answers, decode_moments
from post_training.report.flops import FORWARD_AND_BACKWARD, PEAK, forward_flops
from post_training.report.published import DEEPSEEK_V3

_BAR, _SHOWN, _SHOWN_GRAPHS = 40, 5, 12


def largest_parts(job: StepJob, cluster: Cluster) -> list[tuple[str, float]]:
    """Return the parts of a step that take 10 ms or longer as (`stage: part`, seconds), largest first."""
    every = {
        f"{stage}: {part}": seconds
        for stage, parts in step_parts(job, cluster).items()
        for part, seconds in parts.items()
        if seconds >= 0.01
    }
    return sorted(every.items(), key=lambda item: -item[1])


def unknowns(job: StepJob, cluster: Cluster) -> list[str]:
    """Return a sentence for each aspect of this step for which there is no published number."""
    found = []
    if job.spread == SPREAD and job.response_tokens < job.longest:
        found.append(f"the spread {SPREAD:g} of answer lengths is DeepScaleR's; set --response-spread to yours")
    whose, published = ("DeepSeek-V3", DEEPSEEK_V3) if job.sizes.mla else ("Qwen3-235B-A22B", QWEN3_235B)
    if any(job.model.get(key) != published[key] for key in ("hidden_size", "num_hidden_layers")):
        found.append(f"decode steps of this model are not published: operators are taken from {whose}")
    if not job.sizes.mla:
        found.append("training of this model is not published: FLOPs a second are taken from DeepSeek-V3")
    if job.sequences > job.engine_sequences * job.rollout_ranks(cluster):
        found.append(
            "sequences wait for a place: published rollouts with waiting took 1.4 to 1.5 times the modelled time"
        )
    if job.rebalanced:
        found.append("the time to move requests is not published, and is not in the rollout")
    if cluster.dies > given().supernode_dies:
        found.append(f"nothing is published beyond {given().supernode_dies:g} dies: this is an extrapolation")
    return found


def _graphs(job: StepJob, cluster: Cluster) -> dict[int, float]:
    """Return the share of decode steps by rows of their graph, largest graph first."""
    moments = decode_moments(job, cluster)
    every = sum(moment.steps for moment in moments)
    return {moment.slots: moment.steps / every for moment in moments}


def time_estimates(job: StepJob, cluster: Cluster) -> dict[str, Any]:
    """Return the contents of the text for programs. Rates are tokens per second and card of two dies."""
    parts = step_parts(job, cluster)
    seconds = {stage: sum(each.values()) for stage, each in parts.items()}
    return {
        "modelled": True,
        "dies": cluster.dies,
        "step_s": sum(seconds.values()),
        "tokens_a_second_and_card": step_rate(job, cluster, seconds),
        "stages_s": seconds,
        "parts_s": parts,
        "answers": {**asdict(answers(job, cluster)), "spread": job.spread, "graphs": _graphs(job, cluster)},
        "unknown": unknowns(job, cluster),
    }


def describe_time(job: StepJob, cluster: Cluster) -> str:
    """Format the modelled step as text."""
    parts = step_parts(job, cluster)
    seconds = {stage: sum(each.values()) for stage, each in parts.items()}
    total = sum(seconds.values())
    dies = f"{cluster.dies} {'die' if cluster.dies == 1 else 'dies'}"
    lines = [f"modelled step, {dies}; not measured, see docs/rollout.md"]
    for stage, value in seconds.items():
        lines.append(f"  {stage:<13}{value:>10.1f} s  {'#' * round(_BAR * value / total)}")
    lines.append(
        f"  {'step':<13}{total:>10.1f} s  {step_rate(job, cluster, seconds):.1f} tokens a second and card\n"
        "  where it goes, and so what is next to make faster:"
    )
    for name, value in largest_parts(job, cluster)[:_SHOWN]:
        lines.append(f"    {value:>9.1f} s {value / total:>5.0%}  {name}")
    lines += _rollout_lines(job, cluster)
    work = FORWARD_AND_BACKWARD * job.sequences * forward_flops(job.model, job.prompt_tokens + job.response_tokens)
    share = work / seconds["update"] / cluster.dies / (PEAK.teraflops * 1e12)
    lines.append(f"  the update at {share:.0%} of {PEAK.teraflops:g} TFLOPS a die, without what is recomputed")
    lines += [f"  not known: {sentence}" for sentence in unknowns(job, cluster)]
    return "\n".join(lines)


def _rollout_lines(job: StepJob, cluster: Cluster) -> list[str]:
    """Format the lengths of the modelled answers, and the graphs in which decode steps run."""
    lengths, graphs = answers(job, cluster), _graphs(job, cluster)
    shown = ", ".join(f"{rows}: {share:.0%}" for rows, share in graphs.items() if share >= 0.005)
    many = "" if len(graphs) <= _SHOWN_GRAPHS else f"; the largest has {max(graphs)} rows"
    return [
        f"  answers: log-normal with spread {job.spread:g}, mean {job.response_tokens:g}, {lengths.at_limit:.1%} at "
        f"the limit of {job.longest};",
        f"    the first rank ends after {lengths.first_rank_ends:.0%} of {lengths.steps:.0f} decode steps",
        f"  decode steps by rows of their graph: {'one for each number of sequences' + many if many else shown}",
    ]
