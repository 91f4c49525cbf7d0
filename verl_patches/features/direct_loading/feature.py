"""The feature direct_loading: its key, and the checks of the folder before anything starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlay import ConfigurationError, Feature, Key

KEY = "actor_rollout_ref.actor.megatron.load_from_hf"


def check_ways_of_loading(config: Mapping[str, Any], settings: Any) -> None:
    """Check that no other setting overwrites these weights, or keeps them from being loaded."""
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    for role in ("actor", "ref"):
        if config["actor_rollout_ref"][role]["megatron"].get("use_dist_checkpointing"):
            raise ConfigurationError(
                f"{KEY} and actor_rollout_ref.{role}.megatron.use_dist_checkpointing=True both define where the "
                "weights come from. Set one of them"
            )
    if not actor["load_weight"]:
        raise ConfigurationError(
            f"actor_rollout_ref.actor.load_weight=False is invalid: it would ignore {KEY}. Set it to True"
        )
    if not rollout["load_format"].startswith("dummy"):
        raise ConfigurationError(
            f"actor_rollout_ref.rollout.load_format={rollout['load_format']} is invalid: every rank would read all of "
            f"actor_rollout_ref.model.path before {KEY}. Set it to dummy_megatron"
        )


def check_folder(config: Mapping[str, Any], settings: Any) -> None:
    """Check that the folder has every tensor of the model in actor_rollout_ref.model.path, intact by its headers.

    A model path on a remote file system is not compared.
    """
    from post_training.checkpoint.huggingface import check_tensors, open_huggingface
    from post_training.models.families import table_for

    folder = Path(settings.load_from_hf)
    if not folder.is_dir():
        raise ConfigurationError(
            f"{KEY}={folder} is invalid: not a folder on this machine. Set it to a HuggingFace folder"
        )
    try:
        opened = open_huggingface(folder)
        _check_architecture(opened.config)
        table = table_for(opened.config)
        check_tensors(opened, table.shapes, table.ignored_in_files)
        opened.source(table.shapes)
        described = _described(config["actor_rollout_ref"]["model"]["path"])
        if described is not None:
            _check_architecture(described)
            if described.get("quantization_config"):
                raise ValueError(
                    "actor_rollout_ref.model.path is invalid: its config.json has quantization_config, but the model "
                    "is trained and served in bfloat16. Set it to a folder with the tokenizer and a config.json "
                    "without that entry"
                )
            _check_same_sizes(table.shapes, table_for(described).shapes)
    except ValueError as error:  # CheckpointError and a table's own rejections are ValueErrors
        raise ConfigurationError(f"{KEY}={folder} cannot be loaded: {error}") from error


def _check_architecture(values: Mapping[str, Any]) -> None:
    from post_training.models.families import families, find_family

    if find_family(values) is None:
        known = ", ".join(each.architecture for each in families())
        raise ValueError(
            f"config.json has architectures {list(values.get('architectures') or ())}, but only {known} can be loaded "
            "this way"
        )


def _described(model_path: str) -> Mapping[str, Any] | None:
    """Read config.json of the model path; None on a remote file system."""
    if "://" in model_path:
        return None
    file = Path(model_path).expanduser() / "config.json"
    try:
        return json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file} of actor_rollout_ref.model.path cannot be read ({error.strerror})") from error


def _check_same_sizes(stored: Mapping[str, tuple[int, ...]], described: Mapping[str, tuple[int, ...]]) -> None:
    for name in sorted(stored.keys() | described.keys()):
        if stored.get(name) != described.get(name):
            raise ValueError(
                f"its config.json implies the shape {stored.get(name)} for tensor {name}, but that of "
                f"actor_rollout_ref.model.path {described.get(name)}; they must describe one model"
            )


DIRECT_LOADING = Feature(
    name="direct_loading",
    purpose="Training and rollout ranks read only their own weights from a HuggingFace folder, BF16 or FP8, and write "
    "nothing.",
    keys=(Key("load_from_hf", KEY, str, ""),),
    switch=KEY,
    is_on=lambda settings: bool(settings.load_from_hf),
    checks=(check_ways_of_loading, check_folder),
)
