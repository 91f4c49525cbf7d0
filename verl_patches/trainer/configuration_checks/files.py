"""The files that a run names: the model's folder and the reward function."""

from __future__ import annotations

import ast
import difflib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from overlay import ConfigurationError
from post_training.end_tokens import EndTokensError, end_tokens
from post_training.rewards import RULES
from post_training.rewards.verifier import Limits
from verl_patches.features.training_checkpoint.storage import check_space
from verl_patches.trainer.configuration_checks.model import described
from verl_patches.trainer.isolated_ray import is_found_by_raylets

_REWARD = "custom_reward_function"
_OUR_RULES = Path(__file__).resolve().parents[2] / "utils" / "reward" / "rule_reward.py"


def check_interpreter() -> None:
    """Check that Ray can start its workers with this Python."""
    if not is_found_by_raylets():
        raise ConfigurationError(
            f"Ray cannot start workers from {sys.executable}, because it misreads the quotes in that path. Move the "
            "environment to a path without quotes and backslashes"
        )


def check_model_folder(config: Mapping[str, Any]) -> None:
    """Check that the model's folder is there with its config.json; a path on a remote file system is left to verl."""
    path = config["actor_rollout_ref"]["model"]["path"]
    if "://" not in path and not (Path(path).expanduser() / "config.json").is_file():
        raise ConfigurationError(
            f"actor_rollout_ref.model.path={path} is invalid: not a folder with a config.json on this machine. Set it "
            "to the folder with the model's config.json, tokenizer and weights"
        )
    if "://" not in path:
        _check_chat_template(Path(path).expanduser())
        _check_end_tokens(Path(path).expanduser(), config["actor_rollout_ref"]["rollout"])


# transformers looks for templates here, in the order of its releases: in one file, and in a folder for several.
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates")


def _check_end_tokens(folder: Path, rollout: Mapping[str, Any]) -> None:
    """Check that some token ends an answer, and that the files that name it are readable."""
    engine = rollout["engine_kwargs"]["vllm"] or {}
    try:
        ends = end_tokens(
            folder, None, rollout.get("stop_token_ids"), engine.get("generation_config"), rollout["ignore_eos"]
        )
    except EndTokensError as error:
        raise ConfigurationError(str(error)) from error
    tokenizer = folder / "tokenizer_config.json"
    if ends.tokens or ends.ignored or not tokenizer.is_file():
        return
    if not json.loads(tokenizer.read_text(encoding="utf-8")).get("eos_token"):
        raise ConfigurationError(
            f"actor_rollout_ref.model.path={folder} is invalid: neither its tokenizer nor a configuration defines a "
            "token that ends an answer. Set eos_token_id in generation_config.json, or "
            "actor_rollout_ref.rollout.stop_token_ids"
        )


def _check_chat_template(folder: Path) -> None:
    """Check that the tokenizer has a chat template, with which verl makes a prompt of every row's messages.

    A folder without tokenizer_config.json is left to verl.
    """
    file = folder / "tokenizer_config.json"
    try:
        values = dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return
    except (OSError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{file} is not a readable JSON object ({error}). Copy the model again") from error
    if not values.get("chat_template") and not any((folder / name).exists() for name in _TEMPLATES):
        raise ConfigurationError(
            f"actor_rollout_ref.model.path={folder} is invalid: its tokenizer has no chat template, which verl needs "
            f"for prompts. Set it to an instruct model, or put a {_TEMPLATES[0]} beside tokenizer_config.json"
        )


def check_checkpoint_space(config: Mapping[str, Any], settings: Any) -> None:
    """Check that the disk has room for the checkpoints of a run that saves."""
    options = config["trainer"]
    model = described(config["actor_rollout_ref"]["model"]["path"])
    if options["save_freq"] > 0 and model is not None:
        keep = settings.checkpoint
        keep = keep if keep.keep_last else replace(keep, keep_last=options["max_actor_ckpt_to_keep"] or 0)
        models = 2 if config["algorithm"]["adv_estimator"] == "gae" else 1
        check_space(Path(options["default_local_dir"]).expanduser().absolute(), model, keep, models)


def check_reward(config: Mapping[str, Any]) -> None:
    """Check that the reward file defines the reward function and that it takes the configured arguments.

    The file is parsed, not executed.
    """
    section = config[_REWARD]
    if section["path"] is None:
        return
    path, name, arguments = Path(section["path"]).expanduser(), section["name"], section.get("reward_kwargs") or {}
    key = f"{_REWARD}.path={path}"
    if not path.is_file():
        raise ConfigurationError(
            f"{key} is not a file on this machine. Set it to the file that defines the reward function"
        )
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, OSError) as error:
        raise ConfigurationError(f"{key} is not readable Python ({error}). Correct the file") from error
    function = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)
    if function is None:
        if name not in _bound_names(body):
            raise ConfigurationError(
                f"{_REWARD}.name={name} is not defined in {path}. Set it to the name of its function"
            )
        return
    _check_arguments(function, arguments)
    if path.resolve() == _OUR_RULES:
        _check_our_rule(arguments)


def _bound_names(body: list[ast.stmt]) -> set[str]:
    """Return the names that the statements of a module bind by importing, assigning and defining, at any depth."""
    bound = set()
    for node in (each for statement in body for each in ast.walk(statement)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
    return bound


def _check_arguments(function: ast.FunctionDef, given: Mapping[str, Any]) -> None:
    taken = [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]
    for name in given:
        if name not in taken and function.args.kwarg is None:
            close = difflib.get_close_matches(name, taken, n=1)
            advice = f"did you mean {close[0]}?" if close else f"it takes {', '.join(taken)}"
            raise ConfigurationError(
                f"{_REWARD}.reward_kwargs.{name} is not an argument of {function.name} in {_REWARD}.path; {advice}"
            )


def _check_our_rule(given: Mapping[str, Any]) -> None:
    key = f"{_REWARD}.reward_kwargs"
    rule = given.get("rule", "boxed")
    if rule not in RULES:
        raise ConfigurationError(f"{key}.rule={rule} is invalid. Set it to one of {', '.join(RULES)}")
    try:
        Limits(**{name: given[name] for name in ("time_limit_s", "budget_s", "workers") if name in given})
    except ValueError as error:
        raise ConfigurationError(f"{key}.{error}") from error


def check_shared_copy(config: Mapping[str, Any], folder: Path = Path("/dev/shm/verl-cache")) -> None:
    """Reject use_shm if verl's folder for it belongs to another user, because every worker would fail on it.

    verl has one such folder for all users of a machine (verl.utils.fs:copy_to_shm), and keeps its copies there.
    """
    groups = {
        "actor_rollout_ref.model": config["actor_rollout_ref"]["model"],
        "critic.model": config.get("critic", {}).get("model", {}),
        "data": config["data"],
    }
    chosen = next((f"{name}.use_shm" for name, group in groups.items() if group.get("use_shm")), None)
    if chosen is None or not folder.exists() or os.access(folder, os.W_OK | os.X_OK):
        return
    raise ConfigurationError(
        f"{chosen}=true is invalid: verl copies the files of all users into {folder}, which belongs to "
        f"{_owner(folder)} here. Set it to false, or let them remove that folder."
    )


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except KeyError:
        return f"user {path.stat().st_uid}"
