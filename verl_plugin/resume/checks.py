"""Rejects, before Ray starts, checkpoints that cannot be resumed, and settings with which a killed save loses all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from post_training.checkpoint.files import CheckpointError
from post_training.report.run_folder import at
from verl_plugin.libraries import LIBRARIES_KEY, libraries_of
from verl_plugin.resume.step_folders import check_complete, newest_complete, tracked_step
from verl_plugin.sentences import invalid
from verl_plugin.step_record.checks import RECORDING

ENGINES = "verl_plugin.resume.engines"
SAMPLER = "trainer.v1.sampler"
KEYS = {
    "trainer.checkpoint_callback_class": "verl_plugin.resume.checkpoint_callback.CompleteCheckpoint",
    f"{SAMPLER}.custom_sampler.path": "pkg://verl_plugin.resume.replay_buffer",
    f"{SAMPLER}.custom_sampler.name": "OrderedReplayBuffer",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class": "verl_plugin.resume.agent_loops.SeededAgentLoopManager",
}
"""Keys that a job sets to be resumed bit for bit, beside `ENGINES` in actor_rollout_ref.model.external_lib."""
_MODE, _KEPT = "trainer.v1.trainer_mode", "trainer.max_actor_ckpt_to_keep"
ON_HOST = "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload"
"""With this key Megatron-core keeps AdamW's state on the host, which also updates the weights."""
_FORMAT = "actor_rollout_ref.actor.megatron.dist_ckpt_optim_fully_reshardable"
_REFILL = f"{SAMPLER}.sync_refill_failed_groups"
_RESUME, _PATH = "trainer.resume_mode", "trainer.resume_from_path"
_MODES = ("disable", "auto", "resume_path")
# verl reads the number behind it, up to the end of the path.
_STEP = "global_step_"


def resume_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each invalid key of saving and resuming.

    Args:
        config: resolved configuration of the whole job.
    """
    buffer, manager = list(KEYS)[2:]
    ordered, seeded = (at(config, key) == KEYS[key] for key in (buffer, manager))
    if ordered != seeded:
        key, other = (manager, buffer) if ordered else (buffer, manager)
        yield invalid(key, at(config, key), f"{other}={KEYS[other]} works only with it", KEYS[key])
    if ordered and at(config, _MODE) not in ("sync", *RECORDING):
        yield invalid(
            buffer, KEYS[buffer], f"{_MODE}={at(config, _MODE)} trains on answers in order of arrival", "null"
        )
    if ordered and at(config, "algorithm.filter_groups.enable"):
        reason = "verl leaves the filter of groups (algorithm.filter_groups.enable) to its own buffer"
        yield invalid(buffer, KEYS[buffer], reason, "null")
    if ordered and at(config, _REFILL):
        yield invalid(_REFILL, True, f"verl refills only its own buffer, and {buffer} is another", "false")
    if at(config, "trainer.save_freq") > 0 and at(config, _KEPT) == 1:
        reason = "verl deletes the previous checkpoint before the new one is complete, and a killed run would have none"
        yield invalid(_KEPT, 1, reason, "2 or null")
    yield from _host_problems(config)
    yield from _checkpoint_problems(config)


def _host_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a job could not load the optimizer that it saves, if that is on the host."""
    if not at(config, ON_HOST) or (at(config, "trainer.save_freq") <= 0 and at(config, _RESUME) == "disable"):
        return
    if ENGINES not in (libraries := libraries_of(config)):
        reason = f"with {ON_HOST}=true Megatron-core 0.16.1 saves an optimizer that it cannot load"
        yield invalid(LIBRARIES_KEY, libraries, reason, f"[..., {ENGINES}], or trainer.save_freq to -1")
    if not at(config, _FORMAT):
        yield invalid(_FORMAT, at(config, _FORMAT), f"with {ON_HOST}=true no other format can be loaded", "true")


def _checkpoint_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error if the checkpoint to resume is not complete, naming the newest complete one."""
    mode, checkpoints = at(config, _RESUME), Path(str(at(config, "trainer.default_local_dir")))
    given: Any = at(config, _PATH)
    if mode not in _MODES:
        yield invalid(_RESUME, mode, "no such mode", " or ".join(_MODES))
    if mode == "resume_path" and not str(given or "").rpartition(_STEP)[2].isdecimal():
        yield invalid(_PATH, given, "not the folder of a step", f"a path that ends in {_STEP}N, without a slash")
        return
    try:
        if mode == "auto":
            step = tracked_step(checkpoints)
            given = None if step is None else checkpoints / f"global_step_{step}"
        if mode not in ("auto", "resume_path") or given is None:
            return
        check_complete(Path(str(given)))
    except CheckpointError as error:
        newest, _ = newest_complete(checkpoints)
        remedy = "disable" if newest is None else f"resume_path, and {_PATH} to {newest}"
        yield invalid(_RESUME, mode, str(error), remedy)
