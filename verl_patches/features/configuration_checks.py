"""What the driver checks before it starts anything, so that a bad run ends in a sentence and not in a hang.

Every check takes the composed configuration as a mapping and raises `ConfigurationError` with one sentence that says
what is wrong and what to change. The features bring their own checks; here is what holds for every run. Nothing here
imports upstream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlay import ConfigurationError
from verl_patches.features.catalogue import FEATURES
from verl_patches.features.settings import OverlaySettings

# Beside the worker of every die Ray places verl's task runner and, while the first worker starts, its register center.
SLOTS_BESIDE_WORKERS = 2


def check_configuration(config: Mapping[str, Any]) -> OverlaySettings:
    """Run every check on verl's composed configuration and return the overlay's settings.

    Raises:
        ConfigurationError: a combination of values cannot run.
        SettingsError: a key of the overlay is unknown or of the wrong kind.
    """
    settings = OverlaySettings.from_config(config["actor_rollout_ref"])
    check_model_path(config)
    check_parallel_sizes(config)
    check_batch_sizes(config)
    check_dynamic_batches(config)
    check_learning_rate(config)
    check_saving(config)
    check_cache_format(config)
    for feature in FEATURES:
        feature.check(config, settings)
    check_ray_slots(config)
    return settings


def check_model_path(config: Mapping[str, Any]) -> None:
    """The model's folder is named; a configuration that cannot know it holds null."""
    if not config["actor_rollout_ref"]["model"]["path"]:
        raise ConfigurationError(
            "actor_rollout_ref.model.path is not set; give the folder with the model's config.json, tokenizer and "
            "weights"
        )


def number_of_dies(config: Mapping[str, Any]) -> int:
    """Dies of the whole run."""
    return config["trainer"]["n_gpus_per_node"] * config["trainer"]["nnodes"]


def training_data_parallel_size(config: Mapping[str, Any]) -> int:
    """Replicas of the training model; call after `check_parallel_sizes`."""
    return number_of_dies(config) // _model_parallel_size(config)


def _model_parallel_size(config: Mapping[str, Any]) -> int:
    megatron = config["actor_rollout_ref"]["actor"]["megatron"]
    return (
        megatron["tensor_model_parallel_size"]
        * megatron["pipeline_model_parallel_size"]
        * megatron["context_parallel_size"]
    )


def check_parallel_sizes(config: Mapping[str, Any]) -> None:
    """The dies divide evenly into training replicas and rollout instances."""
    dies, parallel = number_of_dies(config), _model_parallel_size(config)
    if dies < 1 or dies % parallel:
        raise ConfigurationError(
            f"{dies} dies cannot hold whole training replicas: TP x PP x CP is {parallel}; "
            f"use a multiple of {parallel} dies or change actor_rollout_ref.actor.megatron.*_parallel_size"
        )
    rollout_tp = config["actor_rollout_ref"]["rollout"]["tensor_model_parallel_size"]
    if dies % rollout_tp:
        raise ConfigurationError(
            f"{dies} dies cannot hold whole rollout instances of "
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={rollout_tp}; use a divisor of {dies}"
        )


def check_batch_sizes(config: Mapping[str, Any]) -> None:
    """Every split of a batch that verl makes is even and holds at least one micro batch."""
    actor = config["actor_rollout_ref"]["actor"]
    prompts, responses = config["data"]["train_batch_size"], config["actor_rollout_ref"]["rollout"]["n"]
    dies, replicas = number_of_dies(config), training_data_parallel_size(config)
    mini, micro = actor["ppo_mini_batch_size"], actor["ppo_micro_batch_size_per_gpu"]
    if prompts % dies:
        raise ConfigurationError(
            f"data.train_batch_size={prompts} does not divide among {dies} dies for generation; "
            f"use a multiple of {dies}"
        )
    if prompts % mini:
        raise ConfigurationError(
            f"data.train_batch_size={prompts} is not a multiple of "
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}; choose a mini batch that divides it"
        )
    if (mini * responses) % replicas:
        raise ConfigurationError(
            f"a mini batch of {mini} prompts x {responses} responses does not divide among {replicas} training "
            "replicas; change actor_rollout_ref.actor.ppo_mini_batch_size or actor_rollout_ref.rollout.n"
        )
    per_replica = mini * responses // replicas
    if not micro or micro > per_replica or per_replica % micro:
        raise ConfigurationError(
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro} does not divide the {per_replica} sequences "
            "that a replica gets from a mini batch, so no whole number of gradient accumulation steps exists; "
            f"choose a divisor of {per_replica}"
        )


def check_dynamic_batches(config: Mapping[str, Any]) -> None:
    """Micro batches have a fixed number of sequences.

    At the cluster's commit verl's Megatron actor ignores the keys. In release 0.4.0 every micro batch has the same
    weight in the loss, whatever it holds.
    """
    for section, key in (
        ("actor", "use_dynamic_bsz"),
        ("ref", "log_prob_use_dynamic_bsz"),
        ("rollout", "log_prob_use_dynamic_bsz"),
    ):
        if config["actor_rollout_ref"][section].get(key):
            raise ConfigurationError(
                f"actor_rollout_ref.{section}.{key}=True is ignored, or weighs tokens unequally, by verl's Megatron "
                "actor; set it to False and choose *_micro_batch_size_per_gpu"
            )


def check_learning_rate(config: Mapping[str, Any]) -> None:
    """The learning rate is constant: verl's Megatron worker has no scheduler and ignores what asks for one."""
    optim = config["actor_rollout_ref"]["actor"]["optim"]
    asked = [key for key in ("lr_warmup_steps", "lr_warmup_steps_ratio") if (optim.get(key) or 0) > 0]
    if optim.get("warmup_style", "constant") != "constant":
        asked.append("warmup_style")
    if asked:
        key = f"actor_rollout_ref.actor.optim.{asked[0]}"
        raise ConfigurationError(
            f"{key}={optim[asked[0]]} would be ignored: verl's Megatron worker has no learning rate scheduler; remove "
            "the key and choose a constant actor_rollout_ref.actor.optim.lr"
        )


def check_saving(config: Mapping[str, Any]) -> None:
    """A checkpoint holds every expert: verl saves the model of the first data-parallel rank alone."""
    experts = config["actor_rollout_ref"]["actor"]["megatron"]["expert_model_parallel_size"]
    if config["trainer"]["save_freq"] > 0 and experts > 1:
        raise ConfigurationError(
            f"trainer.save_freq={config['trainer']['save_freq']} would save the experts of one rank in {experts} only, "
            f"because actor_rollout_ref.actor.megatron.expert_model_parallel_size={experts} lies across data-parallel "
            "ranks and verl saves the first of those; set trainer.save_freq=-1"
        )


def check_cache_format(config: Mapping[str, Any]) -> None:
    """A KV cache in the NPU's private format serves steps that are all prefill or all decode."""
    engine = (config["actor_rollout_ref"]["rollout"].get("engine_kwargs") or {}).get("vllm") or {}
    additional = engine.get("additional_config") or {}
    graph, scheduler = (additional.get(name) or {} for name in ("torchair_graph_config", "ascend_scheduler_config"))
    separate = scheduler.get("enabled") and not scheduler.get("enable_chunked_prefill")
    if graph.get("enable_kv_nz") and not separate:
        raise ConfigurationError(
            "torchair_graph_config.enable_kv_nz=True gives wrong tokens with chunked prefill: vLLM-Ascend reads and "
            "writes the ordinary format in steps that mix prefills with decodes; set it to False, or set "
            "ascend_scheduler_config.enabled=True and enable_chunked_prefill=False "
            "(all in actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config)"
        )


def required_ray_slots(config: Mapping[str, Any]) -> int:
    """CPU slots without which Ray's placement group waits for ever."""
    return number_of_dies(config) + SLOTS_BESIDE_WORKERS


def check_ray_slots(config: Mapping[str, Any]) -> None:
    """The number of CPU slots given to a Ray of our own is enough for verl's actors."""
    slots, needed = config["ray_init"]["num_cpus"], required_ray_slots(config)
    if slots is not None and slots < needed:
        raise ConfigurationError(
            f"ray_init.num_cpus={slots} is too few for Ray to place {number_of_dies(config)} workers: it would wait "
            f"for ever; use at least {needed} (Ray counts logical slots, not cores) or null"
        )


def check_cluster_resources(config: Mapping[str, Any], resources: Mapping[str, float]) -> None:
    """A Ray that runs has what verl's placement group asks for.

    Args:
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


KNOWN_FAILURES = (
    (
        "No available memory for the cache blocks",
        "no device memory is left for the KV cache; raise actor_rollout_ref.rollout.gpu_memory_utilization, "
        "give the dies more memory, or use more dies",
    ),
    (
        "out of memory",
        "a die ran out of device memory; give the dies more memory, use more dies, or lower "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu and actor_rollout_ref.rollout.gpu_memory_utilization",
    ),
)


def describe_failure(error: BaseException) -> str:
    """One sentence for an exception out of the run; a remedy where the cause is a known one."""
    text = str(error)
    for sign, sentence in KNOWN_FAILURES:
        if sign.lower() in text.lower():
            return sentence
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
