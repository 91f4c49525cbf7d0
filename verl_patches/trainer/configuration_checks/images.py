"""Checks of jobs whose prompts may hold images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlay import ConfigurationError
from post_training.models.families import find_family
from verl_patches.trainer.configuration_checks.model import described
from verl_patches.trainer.configuration_checks.sizes import number_of_dies

_NODE = "actor_rollout_ref"


def reads_images(path: str) -> bool:
    """Return whether prompts of the model in this folder may hold images; False if this machine has no such folder."""
    return _reads_images(described(path))


def _reads_images(model: Mapping[str, Any] | None) -> bool:
    family = find_family(model) if model is not None else None
    return family is not None and family.reads_images


def check_truncation(config: Mapping[str, Any], model: Mapping[str, Any] | None) -> None:
    """Reject truncation of prompts with images: the model needs one token for each vector of an image."""
    how = config["data"]["truncation"]
    if _reads_images(model) and how != "error":
        raise ConfigurationError(
            f"data.truncation={how} is invalid: it would cut the tokens of an image, and the model would fail on the "
            "rest. Set it to error; data.filter_overlong_prompts=true drops longer prompts"
        )


def check_micro_batches(config: Mapping[str, Any], model: Mapping[str, Any] | None) -> None:
    """Check that micro batches divide a die's rows: verl cuts rows with images into equal parts, or fails."""
    if not _reads_images(model):
        return
    node, answers = config[_NODE], config[_NODE]["rollout"]["n"]
    rows = config["data"]["train_batch_size"] * answers // number_of_dies(config)
    limits = [
        (f"{_NODE}.{group}.log_prob_micro_batch_size_per_gpu", node[group]["log_prob_micro_batch_size_per_gpu"])
        for group in ("rollout", "ref")
    ]
    for key, micro in limits:
        if micro and (rows < micro or rows % (rows // micro)):
            raise ConfigurationError(
                f"{key}={micro} is invalid: a die has {rows} rows with images a step, which verl splits into "
                f"{rows // micro} equal parts. Set it to a divisor of {rows}"
            )
