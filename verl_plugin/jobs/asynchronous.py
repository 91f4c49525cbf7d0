"""Checks of a job that trains while its rollout generates: verl's trainers `separate_async` and `colocate_async`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from post_training.report.run_folder import at
from verl_plugin.alltoallv.settings import BACKEND, BACKEND_MODULE, LIBRARY
from verl_plugin.libraries import LIBRARIES_KEY, libraries_of
from verl_plugin.offload import LIBRARY as OFFLOAD
from verl_plugin.sentences import invalid
from verl_plugin.trainer_modes import COLOCATED, MODE_KEY, ONE_FORWARD, RECORDED, SEPARATE, SYNCHRONOUS

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_HYBRID = "actor_rollout_ref.hybrid_engine"
_OWN = f"trainer.v1.{SEPARATE}"
_SYNC_STEP, _SWITCH = f"{_OWN}.parameter_sync_step", f"{_OWN}.hybrid_rollout.enable_switch"
_ENGINE, _MODULE = (f"{_ROLLOUT}.checkpoint_engine.{name}" for name in ("backend", "custom_backend_module"))
_DIES = tuple(f"{_ROLLOUT}.{name}" for name in ("nnodes", "n_gpus_per_node"))
_BATCH, _MINI = "data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
_SAVE, _RESUME = "trainer.save_freq", "trainer.resume_mode"
LOG_LEVEL = "VERL_LOGGING_LEVEL"
LOG_LEVEL_KEY = f"ray_kwargs.ray_init.runtime_env.env_vars.{LOG_LEVEL}"
# FSDP2's keys that put weights on the host, and what then goes wrong.
_ON_HOST = {
    "param_offload": "loses all updates of a step but the last",
    "offload_policy": "takes old log-probs from the newest weights",
}
_QUIET = ("WARN", "WARNING", "ERROR", "CRITICAL")


def asynchronous_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a job cannot train while it generates, or would do so in a way that has not been run.

    Args:
        config: resolved configuration of the whole job.
    """
    mode, modes = at(config, MODE_KEY), (SYNCHRONOUS, RECORDED, ONE_FORWARD, SEPARATE, COLOCATED)
    if mode not in modes:
        yield invalid(MODE_KEY, mode, "there is no such trainer", " or ".join(modes))
    if mode not in (SEPARATE, COLOCATED):
        return
    if mode == COLOCATED:
        yield invalid(MODE_KEY, mode, "no step has been run with it here", SYNCHRONOUS)
    if at(config, _SAVE) > 0:
        reason = f"{MODE_KEY}={mode} saves the queue of answers too, which TransferQueue 0.1.8 cannot"
        yield invalid(_SAVE, at(config, _SAVE), reason, f"-1, or {MODE_KEY} to {SYNCHRONOUS}")
    if at(config, _RESUME) != "disable":
        reason = f"no run has been resumed with {MODE_KEY}={mode}"
        yield invalid(_RESUME, at(config, _RESUME), reason, f"disable, or {MODE_KEY} to {SYNCHRONOUS}")
    yield from _separate_problems(config)


def rollout_dies(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of dies on which the rollout generates, and how many of them are on a node."""
    group = at(config, _ROLLOUT) if at(config, MODE_KEY) == SEPARATE else config["trainer"]
    return int(group["nnodes"] * group["n_gpus_per_node"]), int(group["n_gpus_per_node"])


def _separate_problems(config: Mapping[str, Any]) -> Iterator[str]:
    for key in _DIES:
        value = at(config, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield invalid(key, value, f"with {MODE_KEY}={SEPARATE} the rollout has dies of its own", "1 or more")
    yield from _weight_problems(config)
    for key in (_SWITCH, _HYBRID):
        if at(config, key):
            reason = f"training dies that generate too were not run with {MODE_KEY}={SEPARATE}"
            yield invalid(key, True, reason, "false")
    yield from _update_problems(config)
    level = at(config, LOG_LEVEL_KEY) or os.environ.get(LOG_LEVEL)
    if level not in _QUIET:
        yield invalid(LOG_LEVEL_KEY, level, f"with {_HYBRID}=false verl 0.9.1 ends at a line of its log", "WARN")


def _weight_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Require alltoallv between the dies: verl's own engines were only run to compare them with it."""
    libraries = libraries_of(config)
    apart = "training and rollout have dies of their own"
    if at(config, _ENGINE) != BACKEND:
        yield invalid(_ENGINE, at(config, _ENGINE), f"{apart}, which was only run with {BACKEND}", BACKEND)
    if at(config, _MODULE) != BACKEND_MODULE:
        yield invalid(_MODULE, at(config, _MODULE), f"verl finds {_ENGINE}={BACKEND} only there", BACKEND_MODULE)
    if LIBRARY not in libraries:
        yield invalid(
            LIBRARIES_KEY, libraries, f"{_ENGINE}={BACKEND} sends what that module offers", f"[{LIBRARY},...]"
        )
    if OFFLOAD in libraries:
        reason = f"{apart}, which was not run with {OFFLOAD}"
        yield invalid(LIBRARIES_KEY, libraries, reason, f"a list without {OFFLOAD}")


def _update_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Check the optimizer steps between two weight updates, each of a mini batch.

    verl computes old log-probs with the weights that the rollout has. It keeps a copy of them on the host, and another
    one of the newest weights, which it brings back afterwards.
    """
    steps, batch, mini = (at(config, key) for key in (_SYNC_STEP, _BATCH, _MINI))
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        yield invalid(_SYNC_STEP, steps, "not a count", "a whole number, at least 1")
    elif steps * mini != batch:
        reason = f"{_BATCH}={batch} is not {steps} times {_MINI}={mini}, an optimizer step each"
        yield invalid(_SYNC_STEP, steps, reason, f"{batch // mini}, or {_BATCH} to {steps * mini}")
    elif at(config, _BYPASS):
        reason = f"{MODE_KEY}={SEPARATE} was only run with old log-probs of its own forward"
        yield invalid(_BYPASS, True, reason, "false")
    else:
        yield from _copy_problems(config, steps)


def _copy_problems(config: Mapping[str, Any], steps: int) -> Iterator[str]:
    """Reject what verl cannot copy: docs/upstream/verl-separate-async-offloaded-weights.md."""
    if at(config, f"{_ACTOR}.strategy") == "megatron":
        key = f"{_ACTOR}.megatron.use_distributed_optimizer"
        if not at(config, key):
            yield invalid(key, at(config, key), f"{MODE_KEY}={SEPARATE} copies that optimizer's buffers", "true")
        return
    for name, lost in _ON_HOST.items():
        key = f"{_ACTOR}.fsdp_config.{name}"
        if steps > 1 and at(config, key):
            reason = f"with {_SYNC_STEP}={steps} verl keeps no copy of weights on the host, and {lost}"
            yield invalid(key, True, reason, "false")
