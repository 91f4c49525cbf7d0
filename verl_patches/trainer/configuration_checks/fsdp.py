"""Checks of FSDP configurations beyond their schema: the features that FSDP supports, the keys that FSDP2 reads, and
Ulysses sequence parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlay import ConfigurationError
from verl_patches.features.settings import OverlaySettings

_NODE = "actor_rollout_ref"
_OVERLAY = f"{_NODE}.overlay"
_WRITTEN_FOR_MEGATRON = (
    (f"{_OVERLAY}.reshard.enabled", False, "verl's own manager gives the rollout its weights"),
    (f"{_OVERLAY}.residency.enabled", False, "vLLM-Ascend's sleep mode takes the rollout off the device"),
    (f"{_OVERLAY}.measure.verify_weights", False, "precision=float32 and its limit for log-probs find stale weights"),
    (f"{_OVERLAY}.mindspeed.engine", "off", "MindSpeed changes Megatron"),
    (f"{_OVERLAY}.rollout.expert_parallel_size", 1, "vLLM's expert parallelism needs reshard"),
    (f"{_OVERLAY}.router_balance.forced", False, "it is only for models with experts on Megatron"),
)


def check_features(config: Mapping[str, Any], settings: OverlaySettings) -> None:
    """Reject features that are written for Megatron only."""
    for key, needed, instead in _WRITTEN_FOR_MEGATRON:
        value: Any = settings
        for name in key.removeprefix(f"{_OVERLAY}.").split("."):
            value = getattr(value, name)
        if value != needed:
            raise ConfigurationError(
                f"{key}={value} is for Megatron, but this configuration trains with FSDP, where {instead}. Set it to "
                f"{str(needed).lower()}"
            )


def check_sequence_sharing(config: Mapping[str, Any]) -> None:
    """Check Ulysses: it needs removed padding and one size for actor and reference policy, and excludes a critic.

    Also rejects torch.compile together with removed padding, for which torch has no compiler on NPUs.
    """
    node, key = config[_NODE], f"{_NODE}.actor.ulysses_sequence_parallel_size"
    size, of_reference = (node[name]["ulysses_sequence_parallel_size"] for name in ("actor", "ref"))
    if node["model"]["use_remove_padding"] and node["actor"]["use_torch_compile"]:
        raise ConfigurationError(
            f"{_NODE}.actor.use_torch_compile=true compiles the entropy of sequences without padding, for which torch "
            f"has no compiler on NPUs. Set it to false, or {_NODE}.model.use_remove_padding"
        )
    if of_reference != size:
        raise ConfigurationError(
            f"{_NODE}.ref.ulysses_sequence_parallel_size={of_reference} is invalid: one group of dies shares the "
            f"sequences of actor and reference. Set it to {key}={size}"
        )
    if size == 1:
        return
    if not node["model"]["use_remove_padding"]:
        raise ConfigurationError(
            f"{key}={size} only splits sequences without padding. Set {_NODE}.model.use_remove_padding to true"
        )
    if config["algorithm"]["adv_estimator"] == "gae":
        raise ConfigurationError(
            f"{key}={size} is not tested with a critic (algorithm.adv_estimator=gae), which would keep whole "
            "sequences. Set it to 1"
        )


def check_token_limits(config: Mapping[str, Any]) -> None:
    """Check the token limits: verl's splitter rejects a limit below the width of a batch, padding included."""
    node, data = config[_NODE], config["data"]
    width, sharing = (
        data["max_prompt_length"] + data["max_response_length"],
        node["actor"]["ulysses_sequence_parallel_size"],
    )
    for group, switch, limit in (
        ("actor", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
        ("rollout", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
        ("ref", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
    ):
        tokens = node[group][limit]
        if node[group][switch] and tokens * sharing < width:
            raise ConfigurationError(
                f"{_NODE}.{group}.{limit}={tokens} is less than the {width} tokens of a prompt with its answer "
                f"(data.max_prompt_length + data.max_response_length)"
                + (f" on {sharing} dies that share a sequence" if sharing > 1 else "")
                + f". Set it to at least {-(-width // sharing)}, or set {_NODE}.{group}.{switch} to false"
            )


def check_strategies(config: Mapping[str, Any]) -> None:
    """Check that reference policy and critic use the actor's strategy, and that FSDP2 reads the keys that are set."""
    key, strategy = f"{_NODE}.actor.strategy", config[_NODE]["actor"]["strategy"]
    others = [(f"{_NODE}.ref", config[_NODE]["ref"])]
    shardings = [(f"{_NODE}.{name}.fsdp_config", config[_NODE][name]["fsdp_config"]) for name in ("actor", "ref")]
    if config["algorithm"]["adv_estimator"] == "gae":
        others.append(("critic", config["critic"]))
        shardings.append(("critic.model.fsdp_config", config["critic"]["model"]["fsdp_config"]))
    for name, node in others:
        if node["strategy"] != strategy:
            raise ConfigurationError(
                f"{name}.strategy={node['strategy']} is invalid: a job has one strategy. Set it to {key}={strategy}"
            )
    if strategy == "fsdp2":
        for name, node in shardings:
            _check_read_by_fsdp2(name, node)


def _check_read_by_fsdp2(name: str, node: Mapping[str, Any]) -> None:
    """Reject keys that verl reads for FSDP1 only."""
    policy, precision = node["wrap_policy"], node.get("mixed_precision") or {}
    for key, value, default in (
        ("wrap_policy.min_num_params", policy.get("min_num_params", 0), 0),
        ("wrap_policy.disable", policy.get("disable", False), False),
        ("mixed_precision.buffer_dtype", precision.get("buffer_dtype", "fp32"), "fp32"),
    ):
        if value != default:
            raise ConfigurationError(
                f"{name}.{key}={str(value).lower()} is read only by strategy fsdp, but this configuration trains with "
                "fsdp2. Remove it, or use fsdp"
            )
