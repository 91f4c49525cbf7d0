"""Rejects, before Ray starts, a job in which training's state would stay on dies whose memory the rollout needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from post_training.report.run_folder import at
from verl_plugin.alltoallv.settings import LIBRARY as ALLTOALLV
from verl_plugin.libraries import LIBRARIES_KEY, libraries_of
from verl_plugin.offload import LIBRARY
from verl_plugin.sentences import invalid
from verl_plugin.trainer_modes import MODE_KEY, SEPARATE

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_SLEEPS = f"{_ROLLOUT}.enable_sleep_mode"  # true by default
_GROUPS = {"fsdp2": "fsdp_config", "megatron": "megatron"}
PEAKS = "verl_plugin.phase_peaks"


def offload_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the offload manager cannot work as `verl_plugin.offload` describes.

    Args:
        config: resolved configuration of the whole job.
    """
    libraries = libraries_of(config)
    if LIBRARY not in libraries:
        return
    for before in (ALLTOALLV, PEAKS):
        if before in libraries and libraries.index(before) > libraries.index(LIBRARY):
            yield invalid(
                LIBRARIES_KEY, libraries, f"{LIBRARY} is listed after {before}", f"[..., {before}, {LIBRARY}]"
            )
    if at(config, MODE_KEY) == SEPARATE:
        return  # the rollout has dies of its own
    if at(config, "algorithm.adv_estimator") == "gae":
        reason = f"{LIBRARY} does not move the state of a critic"
        yield invalid("algorithm.adv_estimator", "gae", reason, f"grpo, or remove {LIBRARY} from {LIBRARIES_KEY}")
    for key, why in _demanded(config):
        if at(config, key) in ((False,) if key == _SLEEPS else (False, None)):
            yield invalid(key, at(config, key), f"with {LIBRARY}: {why}", f"true, or remove {LIBRARY}")


def _demanded(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys that have to be true, and why."""
    strategy = at(config, f"{_ACTOR}.strategy")
    group = f"{_ACTOR}.{_GROUPS[strategy]}"
    yield f"{_ROLLOUT}.free_cache_engine", "the KV cache stays on the dies that train"
    yield _SLEEPS, "the rollout's weights and KV cache stay on the dies that train"
    if not (strategy == "fsdp2" and at(config, f"{group}.offload_policy")):  # verl moves layer by layer then
        yield f"{group}.param_offload", "the KV cache is loaded while parameters are on the dies"
        yield (
            f"{group}.optimizer_offload",
            "the rollout's weights are loaded while the optimizer's state is on the dies",
        )
    if strategy == "megatron":
        own = f"{group}.use_distributed_optimizer"
        yield own, "verl leaves the optimizer's float32 weights on the dies"
        if at(config, f"{_ACTOR}.use_kl_loss") or at(config, "algorithm.use_kl_in_reward"):
            yield f"{_REF}.megatron.param_offload", "the reference is on the dies in every phase"
