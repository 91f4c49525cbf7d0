"""Rejects settings that the rollout's engine cannot run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from overlay import ConfigurationError

_ROLLOUT = "actor_rollout_ref.rollout"
_ADDITIONAL = f"{_ROLLOUT}.engine_kwargs.vllm.additional_config"
_ONLY_FOR_GRAPHS = (
    "use_cached_graph",
    "use_cached_kv_cache_bytes",
    "graph_batch_sizes",
    "graph_batch_sizes_init",
    "enable_multistream_mla",
    "enable_multistream_moe",
    "enable_kv_nz",
    "enable_super_kernel",
)


def _ascend_options(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return torchair_graph_config and ascend_scheduler_config, each empty if it is not given."""
    engine = config["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"] or {}
    additional = engine.get("additional_config") or {}
    return additional.get("torchair_graph_config") or {}, additional.get("ascend_scheduler_config") or {}


def check_lengths(config: Mapping[str, Any]) -> None:
    """Check that the longest sequence fits into the engine, and into one forward if prompts are not cut into chunks."""
    data, rollout = config["data"], config["actor_rollout_ref"]["rollout"]
    needed = data["max_prompt_length"] + data["max_response_length"]
    longest = rollout["max_model_len"] or needed
    if longest < needed:
        raise ConfigurationError(
            f"{_ROLLOUT}.max_model_len={longest} is less than data.max_prompt_length={data['max_prompt_length']} and "
            f"data.max_response_length={data['max_response_length']} together. Set it to {needed} or null"
        )
    tokens = rollout["max_num_batched_tokens"]
    scheduler = _ascend_options(config)[1]
    whole = scheduler.get("enabled") and not scheduler.get("enable_chunked_prefill")
    if tokens < longest and (rollout["enable_chunked_prefill"] or whole):
        remedy = (
            "set ascend_scheduler_config.enable_chunked_prefill=True"
            if whole
            else (f"set {_ROLLOUT}.enable_chunked_prefill=False, which the V1 engine ignores")
        )
        raise ConfigurationError(
            f"{_ROLLOUT}.max_num_batched_tokens={tokens} is less than the {longest} tokens that a sequence may have. "
            f"Set it to at least {longest}, or {remedy}"
        )


def check_graphs(config: Mapping[str, Any]) -> None:
    """Check that the graph settings agree; `check_model` checks which kind of graph the model supports."""
    rollout, (graph, _) = config["actor_rollout_ref"]["rollout"], _ascend_options(config)
    if not rollout["enforce_eager"] and rollout["free_cache_engine"]:
        raise ConfigurationError(
            f"{_ROLLOUT}.free_cache_engine=True is not supported with graphs. Set it to False (the overlay's residency "
            f"frees the cache), or {_ROLLOUT}.enforce_eager=True"
        )
    if graph.get("enabled") and rollout["enforce_eager"]:
        raise ConfigurationError(
            f"{_ROLLOUT}.enforce_eager=True and torchair_graph_config.enabled=True contradict each other. Change one "
            f"of them ({_ADDITIONAL})"
        )
    for name in _ONLY_FOR_GRAPHS:
        if graph.get(name) and not graph.get("enabled"):
            raise ConfigurationError(
                f"{_ADDITIONAL}.torchair_graph_config.{name}={graph[name]} is only valid with enabled=True beside it. "
                "Remove it, or enable the graph"
            )


def check_cache_format(config: Mapping[str, Any]) -> None:
    """Reject a KV cache in the NPU's private format unless every step is all prefill or all decode."""
    graph, scheduler = _ascend_options(config)
    separate = scheduler.get("enabled") and not scheduler.get("enable_chunked_prefill")
    if graph.get("enable_kv_nz") and not separate:
        raise ConfigurationError(
            "torchair_graph_config.enable_kv_nz=True gives wrong tokens with chunked prefill: vLLM-Ascend reads and "
            "writes the ordinary format in steps that mix prefills with decodes. Set it to False, or set "
            "ascend_scheduler_config.enabled=True and enable_chunked_prefill=False (all in "
            "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config)"
        )


def check_task_queue(config: Mapping[str, Any]) -> None:
    """Reject ACL graphs with TASK_QUEUE_ENABLE=2, with which torch_npu captures none (its NPUGraph.cpp).

    The driver has the same environment as the dies.
    """
    graph, _ = _ascend_options(config)
    captures = not config["actor_rollout_ref"]["rollout"]["enforce_eager"] and not graph.get("enabled")
    if captures and os.environ.get("TASK_QUEUE_ENABLE") == "2":
        raise ConfigurationError(
            f"TASK_QUEUE_ENABLE=2 is invalid with ACL graphs, which {_ROLLOUT}.enforce_eager=False captures where "
            "torchair's graph is off: torch_npu rejects the capture. Set TASK_QUEUE_ENABLE=1 in the file of the "
            "cluster, or enforce_eager=True"
        )
