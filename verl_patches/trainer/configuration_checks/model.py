"""Checks of the model's config.json against the layout in the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from overlay import ConfigurationError
from post_training.plan.model_findings import ModelUse, model_findings, stage_list_findings
from post_training.user_files import FileError, read_object
from verl_patches.trainer.configuration_checks.backends import backend_of
from verl_patches.trainer.configuration_checks.sizes import number_of_dies

_PATH = "actor_rollout_ref.model.path"


def check_model_path(config: Mapping[str, Any]) -> None:
    """Check that the model's folder is given; configurations that cannot know it hold null."""
    if not config["actor_rollout_ref"]["model"]["path"]:
        raise ConfigurationError(
            f"{_PATH} is not set. Set it to the folder with the model's config.json, tokenizer and weights"
        )


def described(path: str) -> Mapping[str, Any] | None:
    """Read config.json of a model's folder; None if this machine has none.

    Raises:
        ConfigurationError: the file is there but describes no model.
    """
    file = Path(path).expanduser() / "config.json"
    try:
        return read_object(file)
    except FileError as error:
        if error.missing:
            return None
        raise ConfigurationError(f"{error}. Copy the model again") from error


def check_model(config: Mapping[str, Any], model: Mapping[str, Any] | None) -> None:
    """Check that the job can train and serve the model, and train its critic; `model` holds the values of config.json.

    Without a config.json on this machine the workers run the same check.
    """
    backend, node = backend_of(config), config["actor_rollout_ref"]
    if model is not None:
        _reject(model_findings(model, ModelUse(node, backend, number_of_dies(config))))
    path = config["critic"]["model"]["path"] if config["algorithm"]["adv_estimator"] == "gae" else None
    if path and path != node["model"]["path"] and (critic := described(path)) is not None:
        use = ModelUse(node, backend, number_of_dies(config), serves=False)
        _reject(f"critic.model.path={path}: {each}" for each in model_findings(critic, use))


def check_stages(config: Mapping[str, Any]) -> None:
    """Check that a list of layers has an entry for each stage, also without a config.json on this machine."""
    if backend_of(config) == "megatron":
        _reject(stage_list_findings(config["actor_rollout_ref"]["actor"]["megatron"]))


def _reject(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        raise ConfigurationError(sentence)
