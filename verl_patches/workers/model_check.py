"""A worker's own check of the model, whose folder the driver's machine may not have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from overlay import ConfigurationError
from post_training.plan.model_findings import ModelUse, model_findings
from verl_patches.trainer.configuration_checks.backends import backend_of
from verl_patches.trainer.configuration_checks.model import described


def check_workers_model(config: Mapping[str, Any]) -> None:
    """Check that the job can train and serve the model in its folder, as this process sees the folder.

    Args:
        config: verl's group `actor_rollout_ref`.

    Raises:
        ConfigurationError: it cannot; the message is that of `--check` on a machine with the same folder.
    """
    model = described(_local(config["model"]["path"]))
    if model is None:
        return
    node: Any = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    use = ModelUse(node, backend_of({"actor_rollout_ref": node}), int(os.environ["WORLD_SIZE"]))
    for sentence in model_findings(model, use):
        raise ConfigurationError(sentence)


def _local(path: str) -> str:
    """Return the folder on this machine; verl copies one on a remote file system, once."""
    if "://" not in path:
        return path
    from verl.utils.fs import copy_to_local

    return str(copy_to_local(path))
