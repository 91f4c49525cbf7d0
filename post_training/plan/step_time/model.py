"""Models the seconds of a step by stage and part, from a job, a cluster and constants of published rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import isclose, log2
from typing import Any

from post_training.plan.step_time.job import BFLOAT16, Cluster, StepJob, weights_of
from post_training.plan.step_time.published import PUBLISHED_CLUSTER, Given, Row, given, rows
from post_training.plan.step_time.rollout import Moment, answers, decode_moments
from post_training.report.flops import FORWARD_AND_BACKWARD, PEAK, forward_flops

STAGES = ("rollout", "old_log_prob", "ref", "reward", "update", "reshard", "offload")
PUBLISHED_LAYERS = 61
Parts = Mapping[str, float]
_INT64, _FLOAT32 = 8, 4
_PASSES = 200


@dataclass(frozen=True)
class Constants:
    """Constants of the model: given ones, and those fitted to the rows of published.toml that name them.

    Attributes:
        given: constants that a source states.
        layer, row: seconds per layer in a decode step, and per layer and row of the graph, that bytes and FLOPs do not
            explain, with multi-head latent attention.
        grouped_layer, grouped_row: the same with grouped queries, including the host's work.
        grouped_cache: factor by which reading the cache with grouped queries takes longer than the memory's bandwidth
            allows.
        ref_flops, update_flops: FLOPs per second and die.
        ref_imbalance, update_imbalance: factor by which a stage takes longer if experts are not balanced.
        reshard_of_layer: seconds per layer that links do not explain.
        offload_bytes: bytes per second and die between device and host.
        reward_of_token: seconds per response token.
        driver_bytes: bytes per second that the driver hands to workers.
    """

    given: Given
    layer: float = 0.0
    row: float = 0.0
    grouped_layer: float = 0.0
    grouped_row: float = 0.0
    grouped_cache: float = 0.0
    ref_flops: float = float("inf")
    update_flops: float = float("inf")
    ref_imbalance: float = 1.0
    update_imbalance: float = 1.0
    reshard_of_layer: float = 0.0
    offload_bytes: float = float("inf")
    reward_of_token: float = 0.0
    driver_bytes: float = float("inf")


def step_seconds(job: StepJob, cluster: Cluster, constants: Constants | None = None) -> dict[str, float]:
    """Return the modelled seconds of each of STAGES.

    Raises:
        ValueError: there is no formula for the model.
    """
    return {stage: sum(parts.values()) for stage, parts in step_parts(job, cluster, constants).items()}


def step_parts(job: StepJob, cluster: Cluster, constants: Constants | None = None) -> dict[str, Parts]:
    """Return the modelled seconds of each of STAGES by part. Raises ValueError for a model without a formula."""
    return {stage: _parts(stage, job, cluster, constants or fitted()) for stage in STAGES}


def _parts(stage: str, job: StepJob, cluster: Cluster, found: Constants) -> Parts:
    if stage == "decode step":
        return _decode(job, cluster, found)
    if stage == "rollout":
        return _rollout(job, cluster, found)
    if stage == "reward":
        return {"the rule": job.sequences * job.response_tokens * found.reward_of_token}
    if stage == "reshard":
        return _reshard(job, cluster, found)
    if stage == "offload":
        return {"copies": _offloaded(job, cluster) / found.offload_bytes}
    if stage == "old_log_prob" and not job.old_log_prob:
        return {}
    computing = _update(job, cluster, found) if stage == "update" else _reference(job, cluster, found)
    return {"computing": computing, "until the last die starts": _skew(job, cluster, found, stage)}


@cache
def fitted() -> Constants:
    """Return the given constants, and those fitted to all published rows whose use is `fitted`."""
    return fit(given())


def fit(known: Given) -> Constants:
    """Fit one constant to each fitted row, so that the model meets the row with all other constants unchanged.

    Several constants affect the same rollouts, so the rows are repeated until no constant changes.
    """
    found, given_by = Constants(known), [row for row in rows() if row.use == "fitted"]
    for _ in range(_PASSES):
        before = found
        for row in given_by:
            found = _with(found, row.fits, _solve(row, found))
        if all(isclose(getattr(found, row.fits), getattr(before, row.fits), rel_tol=1e-9) for row in given_by):
            break
    return found


def modelled(row: Row, constants: Constants | None = None) -> float:
    """Return the model's value for a row: seconds, tokens per second and card, or a ratio of seconds."""
    found, cluster = constants or fitted(), row.cluster
    if row.of.startswith("skew of "):
        return _skew(row.job, cluster, found, row.of.removeprefix("skew of "))
    if row.of == "step rate":
        return step_rate(row.job, cluster, step_seconds(row.job, cluster, found))
    seconds = sum(_parts(row.of.removesuffix(" rate").removesuffix(" gain"), row.job, cluster, found).values())
    if row.slower is not None:
        return sum(_parts("rollout", row.slower, cluster, found).values()) / seconds
    if row.of == "decode step":
        return seconds / answers(row.job, cluster).steps
    return row.job.sequences * row.job.longest / seconds / (cluster.dies / 2) if row.of == "rollout rate" else seconds


def step_rate(job: StepJob, cluster: Cluster, seconds: Mapping[str, float]) -> float:
    """Return the tokens of prompts and responses per second and card of two dies."""
    return job.sequences * (job.prompt_tokens + job.response_tokens) / sum(seconds.values()) / (cluster.dies / 2)


def _with(constants: Constants, name: str, value: float) -> Constants:
    changes: dict[str, Any] = {name: value}
    return replace(constants, **changes)


def _solve(row: Row, found: Constants) -> float:
    """Return the value of the fitted constant with which the model meets a row.

    The seconds that a constant adds are proportional to a cost, and inversely proportional to a rate, so that an
    infinite rate adds none. An imbalance is a factor of everything except the skew.
    """
    neutral: float = getattr(Constants, row.fits)  # its default
    without = modelled(row, _with(found, row.fits, neutral))
    if row.fits.endswith("imbalance"):
        skew = _skew(row.job, row.cluster, found, row.of)
        return (row.value - skew) / (without - skew)
    one = modelled(row, _with(found, row.fits, 1.0)) - without
    rest = row.value - without
    return rest / one if neutral == 0 else one / rest


def _rollout(job: StepJob, cluster: Cluster, found: Constants) -> Parts:
    """Return the parts of a rollout; all except the prompts are means over draws of the answers' lengths."""
    prompts = job.sequences * forward_flops(job.model, job.prompt_tokens) / cluster.dies
    return {**_decode(job, cluster, found), "prompts": prompts / found.ref_flops}


def _decode(job: StepJob, cluster: Cluster, found: Constants) -> Parts:
    """Return the parts of all decode steps. Every row of a graph costs the same, with a sequence in it or without."""
    known, sizes = found.given, job.sizes
    moments = decode_moments(job, cluster)
    steps = sum(moment.steps for moment in moments)
    rows = sum(moment.steps * moment.slots for moment in moments)
    layer, row = (found.layer, found.row) if sizes.mla else (found.grouped_layer, found.grouped_row)
    # With grouped queries no published number separates the host's work from the operators': the constants are both.
    scheduling = rows / known.scheduling_rows * known.scheduling if sizes.mla else 0.0
    return {
        "operators and their launches": steps * sizes.layers * layer,
        "rows of the graphs": rows * sizes.layers * row,
        "rows without a sequence, at experts": sum(
            moment.steps * _routed(job, cluster, known, moment) for moment in moments
        ),
        "optimizations that are off": steps * _slower(job, known),
        "reading weights and cache": sum(moment.steps * _read(job, found, moment) for moment in moments),
        "scheduling": scheduling,
        "agreements": steps * _agreement(job, cluster, known),
    }


def _routed(job: StepJob, cluster: Cluster, known: Given, moment: Moment) -> float:
    """Return the seconds of empty rows at experts: all choose the same ones, whose dies receive them over one link."""
    sizes = job.sizes
    if not (job.empty_rows_routed and sizes.experts):
        return 0.0
    models = max(1, cluster.dies // job.rollout_ep)
    there_and_back = 2 * moment.empty / models * sizes.hidden * BFLOAT16
    return (sizes.layers - sizes.dense_layers) * there_and_back / known.link_bytes_a_second


def _read(job: StepJob, found: Constants, moment: Moment) -> float:
    """Return the seconds of a decode step for memory and computing.

    A die reads its weights or computes, whichever takes longer, and reads its cache.
    """
    known, sizes, slots = found.given, job.sizes, moment.slots
    weights = weights_of(sizes).in_rollout(job) / known.die_bytes_a_second
    computing = 2 * sizes.weights_met * slots / job.rollout_tp / (PEAK.teraflops * 1e12)
    cache_bytes = moment.cached_tokens * sizes.cache(job.rollout_tp) * sizes.layers * BFLOAT16
    longer = 1.0 if sizes.mla else found.grouped_cache
    return max(weights, computing) + longer * cache_bytes / known.die_bytes_a_second


def _slower(job: StepJob, known: Given) -> float:
    """Return the seconds of a decode step that the optimizations that are off would save."""
    sizes = job.sizes
    expert_layers = sizes.layers - sizes.dense_layers if sizes.experts and sizes.experts <= job.rollout_ep else 0
    share = sizes.layers / PUBLISHED_LAYERS
    seconds = {
        "graphs": sizes.layers * known.graph_of_layer,
        "transpose and cumsum": expert_layers * known.transpose_of_layer,
        "streams": share * known.streams,
        "exchange": share * known.exchange,
        "KV cache in NZ": share * known.cache_nz,
    }
    return sum(seconds[name] for name in job.without)


def _agreement(job: StepJob, cluster: Cluster, known: Given) -> float:
    """Return the seconds of a decode step in which rollout ranks synchronise; published for 128 ranks."""
    ranks = max(1, min(job.rollout_ep, cluster.dies) // job.rollout_tp)
    if ranks == 1:
        return 0.0
    if job.agreements == "hccl":
        return job.a_forward * known.agreement_hccl
    return job.a_forward * known.agreement_gloo * log2(ranks) / log2(PUBLISHED_CLUSTER.dies / 2)


def _reference(job: StepJob, cluster: Cluster, found: Constants) -> float:
    slower = 1.0 if job.balanced else found.ref_imbalance
    return _forward(job, cluster, job.micro_reference) / found.ref_flops * slower


def _update(job: StepJob, cluster: Cluster, found: Constants) -> float:
    """Return the seconds of the update; a recomputed layer runs its forward once more."""
    passes = FORWARD_AND_BACKWARD + min(1.0, job.recomputed / job.stage_layers)
    slower = 1.0 if job.balanced else found.update_imbalance
    return passes * _forward(job, cluster, job.micro) / found.update_flops * slower


def _forward(job: StepJob, cluster: Cluster, micro: int) -> float:
    """Return the FLOPs of a forward of the whole batch on a die of the largest stage, with the pipeline's bubble.

    With 8 stages and 16 micro batches a stage works in 16 of 23 turns: the bubble makes it 23 / 16 as long.
    """
    every = job.sequences * forward_flops(job.model, job.prompt_tokens + job.response_tokens)
    largest = job.stage_layers * job.pp / job.sizes.layers
    batches = max(1.0, job.sequences / (job.dp * micro))
    return every / cluster.dies * largest * (batches + job.pp - 1) / batches


def _skew(job: StepJob, cluster: Cluster, found: Constants, stage: str) -> float:
    """Return the seconds from the first rank's start to the last one's: the driver serves ranks one after another.

    It hands each rank a data-parallel share of the batch as verl pads it: prompts, input_ids, attention_mask,
    position_ids, responses and response_mask in int64; before the update also five tensors of responses in float32, or
    six if old log-probs have a forward of their own.
    """
    known = found.given
    calls = cluster.dies / PUBLISHED_CLUSTER.dies
    if job.data == "dies":
        return calls * (known.skew_dies_update if stage == "update" else known.skew_dies_ref)
    sequence = _INT64 * (4 * job.longest_prompt + 5 * job.longest)
    if stage == "update":
        sequence += _FLOAT32 * (5 + job.old_log_prob) * job.longest
    if job.data == "shared":
        # Each part once, and a call without data to every rank; no published number confirms this.
        return job.sequences * sequence / found.driver_bytes + calls * known.skew_dies_ref
    return cluster.dies * job.sequences / job.dp * sequence / found.driver_bytes


def _reshard(job: StepJob, cluster: Cluster, found: Constants) -> Parts:
    known = found.given
    near = cluster.dies <= known.supernode_dies
    link = known.link_bytes_a_second if near else known.far_link_bytes_a_second
    received = weights_of(job.sizes).in_rollout(job) if cluster.dies > 1 else 0.0
    return {"links": received / link, "layer by layer": job.sizes.layers * found.reshard_of_layer}


def _offloaded(job: StepJob, cluster: Cluster) -> float:
    """Return the bytes between a die and its host in a step: rollout, actor and reference, each in both directions."""
    weights = weights_of(job.sizes)
    return 2 * (weights.in_rollout(job) + 2 * weights.in_training(cluster, job))
