"""Reads the step of a configured job, and the cluster from its file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from post_training.environment_files import read_environment
from post_training.plan.job import Job
from post_training.plan.step_time.job import OPTIMIZATIONS, SPREAD, Cluster, StepJob

MOST_DIES = 4096
MOST_SPREAD = 3.0


def read_cluster(path: Path) -> Cluster:
    """Read the cluster that a file like scripts/env/a3_256_dies.env describes.

    Raises:
        ValueError: there is no such file, NODES or DIES_PER_NODE is no number from 1 to 4096, or there are more than
            4096 dies.
    """
    if not path.is_file():
        raise ValueError(f"--cluster={path} is invalid: not a file. Set it to one like scripts/env/a3_256_dies.env")
    values, dies = read_environment(path), 1
    for name in ("NODES", "DIES_PER_NODE"):
        text = values.get(name, "")
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_DIES):
            raise ValueError(f"{name}={text!r} in {path} is invalid. Set it to a number from 1 to {MOST_DIES}")
        dies *= int(text)
    if dies > MOST_DIES:
        raise ValueError(f"{path} describes {dies} dies, but the model of a step covers at most {MOST_DIES}")
    return Cluster(dies)


def step_job(
    config: Mapping[str, Any],
    job: Job,
    model: Mapping[str, Any],
    cluster: Cluster,
    prompt_tokens: float,
    response_tokens: float,
    spread: float = SPREAD,
) -> StepJob:
    """Return the job's step on a cluster.

    With more dies data parallelism grows; parallel sizes that are larger than the cluster shrink to it.

    Args:
        config, model: verl's resolved configuration and the model's config.json, from which `job` was read.
        prompt_tokens, response_tokens: means of a sequence.
        spread: standard deviation of the logarithm of an answer's length.

    Raises:
        ValueError: the configuration does not allow these lengths, or a critic is trained, which is not modelled.
    """
    if job.critic is not None:
        raise ValueError(
            "algorithm.adv_estimator=gae is invalid: the time of its critic is not modelled. Set it to another "
            "estimator"
        )
    overlay, data = config["actor_rollout_ref"]["overlay"], config["data"]
    longest = data["max_response_length"]
    _check_lengths(job, longest, prompt_tokens, response_tokens, spread)
    agreed, recomputation = overlay["dp_sync"], job.recomputation
    pp, tp = min(job.train.pp, cluster.dies), min(job.rollout.tp, cluster.dies)
    sizes, without = _graphs(config, job)
    return StepJob(
        model=model,
        sequences=job.sequences,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        longest=longest,
        longest_prompt=data["max_prompt_length"],
        rollout_tp=tp,
        rollout_ep=max(tp, min(job.rollout.ep, cluster.dies)),
        engine_sequences=job.engine_sequences,
        graph_sizes=sizes,
        rebalanced=overlay["rollout_rebalance"]["enabled"],
        rebalance_every=agreed["lease_steps"],
        samples=config["actor_rollout_ref"]["rollout"]["n"],
        spread=spread,
        pp=pp,
        dp=max(1, cluster.dies // (job.train.tp * pp)),
        micro=job.micro_update,
        micro_reference=job.micro_reference,
        stage_layers=max(job.train.num_layer_list) if pp == job.train.pp else -(-job.sizes.layers // pp),
        recomputed=recomputation.layers if recomputation and recomputation.granularity == "full" else 0,
        old_log_prob=config["actor_rollout_ref"]["actor"].get("recompute_old_log_prob", True),
        balanced=overlay["router_balance"]["forced"] or not job.sizes.experts,
        data="shared" if overlay["shared_chunks"]["enabled"] else "driver",
        agreements="hccl" if agreed["enabled"] else "gloo",
        a_forward=1 / agreed["lease_steps"] if agreed["enabled"] else 2,
        without=without,
    )


def _check_lengths(job: Job, longest: int, prompt_tokens: float, response_tokens: float, spread: float) -> None:
    """Raise ValueError for means beyond the configuration's limits, or a spread outside 0 to `MOST_SPREAD`."""
    if not 0 <= prompt_tokens <= job.sequence_tokens or not 0 < response_tokens <= longest:
        raise ValueError(
            f"--prompt-tokens={prompt_tokens:g} and --response-tokens={response_tokens:g} must lie within the "
            f"configuration's {job.sequence_tokens} and {longest} tokens"
        )
    if not 0 <= spread <= MOST_SPREAD:
        raise ValueError(
            f"--response-spread={spread:g} is invalid: it must lie between 0 and {MOST_SPREAD:g}. Set it to {SPREAD:g} "
            "or to that of your answers."
        )


def _graphs(config: Mapping[str, Any], job: Job) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the graph sizes of decode steps, and the recipe's optimizations that the job does not use.

    The pinned vLLM-Ascend has no exchange without redundancy: the recipe's row with true weights, on that release, does
    not name it.
    """
    rollout = config["actor_rollout_ref"]["rollout"]
    graph = (rollout["engine_kwargs"]["vllm"].get("additional_config") or {}).get("torchair_graph_config") or {}
    if graph.get("enabled"):
        keys = {
            "transpose and cumsum": not graph.get("enable_view_optimize", True),
            "streams": graph.get("enable_multistream_mla") and graph.get("enable_multistream_moe"),
            "exchange": False,
            "KV cache in NZ": graph.get("enable_kv_nz"),
        }
        sizes = tuple(int(size) for size in graph.get("graph_batch_sizes") or ())
        return sizes or (job.engine_sequences,), tuple(name for name, on in keys.items() if not on)
    # Without torchair a step has one row for each running sequence.
    missing = OPTIMIZATIONS if rollout["enforce_eager"] else OPTIMIZATIONS[1:]
    return tuple(range(1, job.engine_sequences + 1)), missing
