"""The driver's checks before it starts anything, so that a bad run ends with an error message and not in a hang.

`check_configuration` checks the values against their types and ranges and against each other: it needs only the
configuration and, where this machine has it, the model's config.json. `check_machine` checks that the driver's machine
has what the run needs. Each raises `ConfigurationError` with one sentence that says what is wrong and what to change.
The features bring their own checks. Nothing here imports upstream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlay import ConfigurationError
from verl_patches.features.catalogue import FEATURES
from verl_patches.features.settings import OverlaySettings
from verl_patches.trainer.configuration_checks.backends import backend_of
from verl_patches.trainer.configuration_checks.chip import check_chip
from verl_patches.trainer.configuration_checks.critic import check_critic
from verl_patches.trainer.configuration_checks.failures import describe_failure
from verl_patches.trainer.configuration_checks.files import (
    check_checkpoint_space,
    check_interpreter,
    check_model_folder,
    check_reward,
    check_shared_copy,
)
from verl_patches.trainer.configuration_checks.fsdp import (
    check_features,
    check_sequence_sharing,
    check_strategies,
    check_token_limits,
)
from verl_patches.trainer.configuration_checks.handed_over import check_engine_arguments, check_transformer_options
from verl_patches.trainer.configuration_checks.images import check_micro_batches, check_truncation
from verl_patches.trainer.configuration_checks.model import check_model, check_model_path, check_stages, described
from verl_patches.trainer.configuration_checks.names import known_keys, unknown_key
from verl_patches.trainer.configuration_checks.rollout import (
    check_cache_format,
    check_graphs,
    check_lengths,
    check_task_queue,
)
from verl_patches.trainer.configuration_checks.sizes import (
    check_batch_sizes,
    check_cluster_resources,
    check_parallel_sizes,
    check_ray,
    check_ray_slots,
    required_ray_slots,
)
from verl_patches.trainer.configuration_checks.trackers import check_trackers
from verl_patches.trainer.configuration_checks.training import (
    check_group_size,
    check_recomputation,
    check_reward_manager,
)
from verl_patches.trainer.configuration_checks.values import check_values, resolved

__all__ = [
    "ConfigurationError",
    "check_chip",
    "check_cluster_resources",
    "check_configuration",
    "check_machine",
    "describe_failure",
    "known_keys",
    "required_ray_slots",
    "unknown_key",
]


_BOTH = (
    check_parallel_sizes,
    check_group_size,
    check_reward_manager,
    check_batch_sizes,
    check_critic,
    check_lengths,
    check_cache_format,
)
_OF_BACK_END = {
    "megatron": (check_transformer_options, check_model_path, *_BOTH, check_recomputation),
    "fsdp": (check_strategies, check_sequence_sharing, check_model_path, *_BOTH, check_token_limits),
}


def check_configuration(config: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> OverlaySettings:
    """Run every check on verl's composed configuration and return the overlay's settings.

    Args:
        config: the whole configuration.
        model: the values of the model's config.json; without them they are read from actor_rollout_ref.model.path,
            and the checks that depend on them are skipped if this machine has no such file.

    Raises:
        ConfigurationError: a value is wrong, or a combination of values cannot run.
        SettingsError: a key of the overlay is unknown or of the wrong kind.
    """
    values = resolved(config)
    check_values(values)
    settings = OverlaySettings.from_config(values["actor_rollout_ref"], values)
    check_engine_arguments(values)
    backend = backend_of(values)
    for check in _OF_BACK_END[backend]:
        check(values)
    if backend == "fsdp":
        check_features(values, settings)
    model = model if model is not None else described(values["actor_rollout_ref"]["model"]["path"])
    check_graphs(values)
    check_model(values, model)
    check_truncation(values, model)
    check_micro_batches(values, model)
    for feature in FEATURES:
        feature.check(values, settings)
    check_stages(values)
    check_ray(values)
    check_ray_slots(values)
    return settings


def check_machine(config: Mapping[str, Any], model_is_there: bool = True) -> None:
    """Check that this machine has what the run needs; call after `check_configuration`.

    Args:
        config: the whole configuration.
        model_is_there: false if the model has yet to be made.

    Raises:
        ConfigurationError: a chip, package, login, file, environment variable or disk is missing or unsuitable.
    """
    values = resolved(config)
    check_interpreter()
    check_chip(values)
    check_trackers(values)
    check_task_queue(values)
    check_reward(values)
    check_shared_copy(values)
    if model_is_there:
        check_model_folder(values)
        check_checkpoint_space(values, OverlaySettings.from_config(values["actor_rollout_ref"]))
