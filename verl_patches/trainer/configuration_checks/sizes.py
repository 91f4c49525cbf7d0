"""Checks of sizes: the number of dies, the division of models and batches among them, and Ray's slots for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from overlay import ConfigurationError
from verl_patches.trainer.configuration_checks.backends import backend_of

# Besides one worker per die, Ray places verl's task runner and, while the first worker starts, its register center.
SLOTS_BESIDE_WORKERS = 2
# A socket's path has at most 107 bytes, of which Ray takes /session_DATE_TIME_MICROSECONDS_PID/sockets/plasma_store.
_LONGEST_RAY_FOLDER = 107 - len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
_LAST_PORT = 65535


def number_of_dies(config: Mapping[str, Any]) -> int:
    """Return the number of dies of the whole run."""
    return config["trainer"]["n_gpus_per_node"] * config["trainer"]["nnodes"]


def training_data_parallel_size(config: Mapping[str, Any]) -> int:
    """Return the number of replicas of the training model; call after `check_parallel_sizes`."""
    return number_of_dies(config) // _model_parallel_size(config)


def _model_parallel_size(config: Mapping[str, Any]) -> int:
    if backend_of(config) == "fsdp":
        return int(config["actor_rollout_ref"]["actor"].get("ulysses_sequence_parallel_size") or 1)
    megatron = config["actor_rollout_ref"]["actor"]["megatron"]
    return (
        megatron["tensor_model_parallel_size"]
        * megatron["pipeline_model_parallel_size"]
        * megatron["context_parallel_size"]
    )


def check_parallel_sizes(config: Mapping[str, Any]) -> None:
    """Check that the dies divide evenly into training replicas and rollout instances."""
    dies, parallel = number_of_dies(config), _model_parallel_size(config)
    if backend_of(config) == "fsdp" and dies % parallel:
        raise ConfigurationError(
            f"{dies} dies do not divide into whole groups of "
            f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={parallel}, which share sequences. Set it to a "
            f"divisor of {dies}"
        )
    if dies < 1 or dies % parallel:
        raise ConfigurationError(
            f"{dies} dies do not divide into whole training replicas: TP x PP x CP is {parallel}. Use a multiple of "
            f"{parallel} dies or change actor_rollout_ref.actor.megatron.*_parallel_size"
        )
    rollout_tp = config["actor_rollout_ref"]["rollout"]["tensor_model_parallel_size"]
    if dies % rollout_tp:
        raise ConfigurationError(
            f"{dies} dies do not divide into whole rollout instances of "
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={rollout_tp}. Set it to a divisor of {dies}"
        )
    if backend_of(config) == "megatron":
        _check_experts(config)


def _check_experts(config: Mapping[str, Any]) -> None:
    """Check that experts are spread over whole data-parallel replicas, with the other weights' tensor parallelism."""
    megatron = config["actor_rollout_ref"]["actor"]["megatron"]
    key, replicas = "actor_rollout_ref.actor.megatron", training_data_parallel_size(config)
    experts, tensor = megatron["expert_model_parallel_size"], megatron["expert_tensor_parallel_size"]
    if replicas % experts:
        raise ConfigurationError(
            f"{key}.expert_model_parallel_size={experts} does not divide the {replicas} training replicas. Set it to a "
            f"divisor of {replicas}"
        )
    if tensor not in (None, "None", megatron["tensor_model_parallel_size"]):
        raise ConfigurationError(
            f"{key}.expert_tensor_parallel_size={tensor} is not supported by the pinned Megatron-core. Set it to null"
        )


def check_batch_sizes(config: Mapping[str, Any]) -> None:
    """Check that every split of a batch that verl makes is even and holds at least one micro batch."""
    actor = config["actor_rollout_ref"]["actor"]
    prompts, responses = config["data"]["train_batch_size"], config["actor_rollout_ref"]["rollout"]["n"]
    dies, replicas = number_of_dies(config), training_data_parallel_size(config)
    mini, micro = actor["ppo_mini_batch_size"], actor["ppo_micro_batch_size_per_gpu"]
    if prompts % dies:
        raise ConfigurationError(
            f"data.train_batch_size={prompts} does not divide among {dies} dies for generation. Set it to a multiple "
            f"of {dies}"
        )
    if prompts % mini:
        raise ConfigurationError(
            f"data.train_batch_size={prompts} is not a multiple of actor_rollout_ref.actor.ppo_mini_batch_size={mini}. "
            "Set a mini batch that divides it"
        )
    if (mini * responses) % replicas:
        raise ConfigurationError(
            f"a mini batch of {mini} prompts x {responses} responses does not divide among {replicas} training "
            "replicas. Change actor_rollout_ref.actor.ppo_mini_batch_size or actor_rollout_ref.rollout.n"
        )
    per_replica = mini * responses // replicas
    for section, key in (
        ("ref", "log_prob_micro_batch_size_per_gpu"),
        ("rollout", "log_prob_micro_batch_size_per_gpu"),
    ):
        if config["actor_rollout_ref"][section][key] is None:
            raise ConfigurationError(
                f"actor_rollout_ref.{section}.{key}=null is invalid. Set it to the sequences of a micro batch"
            )
    if not actor["use_dynamic_bsz"] and (not micro or micro > per_replica or per_replica % micro):
        raise ConfigurationError(
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro} does not divide the {per_replica} sequences "
            f"of a replica in a mini batch into whole gradient accumulation steps. Set it to a divisor of {per_replica}"
        )


def check_ray(config: Mapping[str, Any]) -> None:
    """Check Ray's address, that its Ray can have as many nodes as the run, and the length of its folder's path."""
    ray, nodes = config["ray_init"], config["trainer"]["nnodes"]
    address, folder = ray["address"], ray.get("temp_dir")
    host, _, port = address.rpartition(":")
    if address not in ("local", "auto") and not (host and port.isdecimal() and 0 < int(port) <= _LAST_PORT):
        raise ConfigurationError(
            f"ray_init.address={address} is invalid. Set it to host:port, to auto for the running Ray, or to local for "
            "the run's own"
        )
    if address == "local" and nodes > 1:
        raise ConfigurationError(
            f"trainer.nnodes={nodes} needs a Ray of {nodes} nodes, but ray_init.address=local starts one only on this "
            "machine. Set trainer.nnodes=1, or start Ray on every node and set ray_init.address=auto"
        )
    if folder is not None and len(os.fsencode(folder)) > _LONGEST_RAY_FOLDER:
        raise ConfigurationError(
            f"ray_init.temp_dir={folder} is {len(os.fsencode(folder))} bytes long, but Ray's sockets in it allow "
            f"{_LONGEST_RAY_FOLDER}. Set a shorter one"
        )


def required_ray_slots(config: Mapping[str, Any]) -> int:
    """Return the number of CPU slots that Ray's placement group needs; with fewer it waits forever."""
    return number_of_dies(config) + SLOTS_BESIDE_WORKERS


def check_ray_slots(config: Mapping[str, Any]) -> None:
    """Check that an isolated local Ray gets enough CPU slots for verl's actors."""
    slots, needed = config["ray_init"]["num_cpus"], required_ray_slots(config)
    if slots is not None and slots < needed:
        raise ConfigurationError(
            f"ray_init.num_cpus={slots} is too low for Ray to place {number_of_dies(config)} workers, and it would "
            f"wait forever. Set it to at least {needed} (Ray counts logical slots, not cores) or null"
        )


def check_cluster_resources(config: Mapping[str, Any], resources: Mapping[str, float]) -> None:
    """Check that a running Ray has the resources that verl's placement group asks for.

    Args:
        config: plain values, every reference followed.
        resources: Ray's totals by name, as `ray.cluster_resources()` returns them.
    """
    dies, slots = number_of_dies(config), required_ray_slots(config)
    for name, needed, remedy in (
        ("NPU", dies, "start Ray where the NPUs are visible, or lower trainer.n_gpus_per_node"),
        ("CPU", slots, "start Ray with more CPU slots (they are logical)"),
    ):
        found = int(resources.get(name, 0))
        if found < needed:
            raise ConfigurationError(f"Ray has {found} of the {needed} {name} slots that this run needs; {remedy}")
