"""verl's own command, `python3 -m verl.trainer.main_ppo key=value ...`, as guides to verl give it.

`verl_patches.prelude_patch` replaces it by `python -m verl_patches.trainer.verl_command` before verl's code runs,
because an isolated local Ray must know its address before anything imports ray. The command composes the configuration
as verl's does, over verl's files with their values for NPUs (`verl_patches/trainer/config/of_verl`), and then runs as
`python -m verl_patches.trainer.main_ppo` does: with every check before anything starts, and with the overlay in every
worker. Other programs that build verl's trainer themselves get the overlay's keys from `completed`.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_patches.trainer import main_ppo
from verl_patches.trainer.ray_connection import StartWorkers, no_source

if TYPE_CHECKING:
    from omegaconf import DictConfig

_DESCRIPTION = """
Train with verl's own command and configurations, with the patches and their checks.

Example:
    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
        data.train_files=FILE actor_rollout_ref.model.path=MODEL --check
"""
_OURS = main_ppo.CONFIG_FOLDER / "of_verl"
_ENVIRONMENT = main_ppo.REPOSITORY / "scripts" / "env" / "one_node.env"
# Variables of the file that are not set here: a launcher sources CANN before it starts a job, and the user decides
# whether a hub may be asked.
_LEFT_TO_THE_USER = ("CANN_ENV", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
# Options of Hydra's own command line that are rejected: a job has no use for them.
_NOT_TAKEN = ("--multirun", "-m", "--run", "-r", "--info", "-i", "--package", "-p", "--shell-completion", "-sc")


def _set_variables() -> None:
    """Set the environment variables of a job on one node before anything reads them; those already set stay."""
    from post_training.environment_files import read_environment

    if _ENVIRONMENT.is_file():
        for name, value in read_environment(_ENVIRONMENT).items():
            if name not in _LEFT_TO_THE_USER:
                os.environ.setdefault(name, value)


def main(arguments: Sequence[str] | None = None, start_workers: StartWorkers | None = None) -> int:
    """Compose, check, run; returns the exit code, as `main_ppo.main` does."""
    from post_training.masking import masked_output

    _set_variables()
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_intermixed_args(words)
    for word in words:
        if word in _NOT_TAKEN:
            return main_ppo.reject(f"{word} is Hydra's and not supported here. Start one command for each job")
    action: main_ppo.Action = "print" if options.cfg else "check" if options.check else "run"
    with masked_output() as secrets:
        return main_ppo.carry_out(lambda: _composed(options, action), action, start_workers or no_source, secrets)


def _parser() -> argparse.ArgumentParser:
    from post_training.command_parser import CommandParser

    parser = CommandParser(prog="python3 -m verl.trainer.main_ppo", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--config-name", "-cn", default="ppo_trainer", metavar="NAME", help="default: ppo_trainer")
    path = "its folder: absolute, beside verl's main_ppo.py, or from here"
    parser.add_argument("--config-path", "-cp", metavar="DIR", help=path)
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a further folder of configurations")
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the resolved configuration and exit")
    parser.add_argument("--resolve", action="store_true", help="with --cfg, where references are always resolved")
    parser.add_argument("--check", action="store_true", help="check everything that a run would check, and exit")
    for word in _NOT_TAKEN:
        parser.add_argument(word, action="store_true", help=argparse.SUPPRESS, dest="not_taken")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides")
    return parser


def _composed(options: argparse.Namespace, action: main_ppo.Action) -> DictConfig:
    config = _filled(compose(options.config_name, options.config_path, options.config_dir, options.overrides))
    if action != "print":
        _find_models(config)
    return config


def compose(name: str, path: str | None, further: str | None, overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration as verl's command would, with verl's own two files as they are on NPUs.

    Raises:
        ConfigurationError: there is no such folder.
        hydra.errors.HydraException: unknown configuration or key.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from post_training.overrides import quoted
    from verl_patches.features.settings import overlay_defaults

    verls, store = main_ppo.verl_config_folder(), ConfigStore.instance()
    for each in sorted(_OURS.glob("*.yaml")):
        store.store(f"verls_{each.stem}", OmegaConf.load(verls / each.name), package="_global_")
    store.store("overlay_defaults", overlay_defaults(), package="_global_")
    store.store("started_ray", {"ray_init": {"address": _address(), "temp_dir": None}}, package="_global_")
    given = _folder(path, verls) if path else _OURS
    given = _OURS if given == verls.resolve() else given
    name = name.removesuffix(".yaml").removesuffix(".yml")
    sources = [*([Path(further).absolute()] if further else []), _OURS, main_ppo.CONFIG_FOLDER, verls]
    listed = ",".join([*(quoted(f"file://{each}") for each in sources), *_search_path(given / f"{name}.yaml")])
    with initialize_config_dir(config_dir=str(given), version_base=None):
        return main_ppo.translated(hydra_compose(name, [f"hydra.searchpath=[{listed}]", *overrides]))


def _folder(path: str, verls: Path) -> Path:
    """Find the folder of `--config-path`: relative to verl's main_ppo.py as in Hydra, else to the working folder as in
    guides, else to this repository.

    Raises:
        ConfigurationError: none of these folders exists.
    """
    from overlay import ConfigurationError

    places = [place / Path(path).expanduser() for place in (verls.parent, Path.cwd(), main_ppo.REPOSITORY)]
    found = next((place.resolve() for place in places if place.is_dir()), None)
    if found is None:
        raise ConfigurationError(
            f"--config-path={path} is invalid: no such folder beside verl's main_ppo.py, in {Path.cwd()} or in "
            f"{main_ppo.REPOSITORY}. Set it to the folder of your configuration"
        )
    return found


def _search_path(file: Path) -> list[str]:
    """Return the search path that a user's own file gives Hydra, which the override would replace."""
    from omegaconf import OmegaConf

    from post_training.overrides import quoted

    if not file.is_file():
        return []
    found = OmegaConf.select(OmegaConf.load(file), "hydra.searchpath") or []
    return [quoted(str(each)) for each in found]


def _address() -> str:
    """Return Ray's address as verl's command would: that of RAY_ADDRESS, else of this user's running Ray, else local.

    Ray itself joins any user's Ray: that of whoever wrote the file last, and for `auto` that of any process it finds.
    """
    if os.environ.get("RAY_ADDRESS"):
        return "auto"
    file = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    try:
        address = file.read_text(encoding="utf-8").strip()
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=2):
            if file.stat().st_uid == os.getuid():
                return address
    except (OSError, ValueError):
        return "local"
    print(
        f"the Ray at {address} belongs to another user, so this run starts its own; set RAY_ADDRESS={address} to join "
        "it",
        file=sys.stderr,
    )
    return "local"


def _find_models(config: DictConfig) -> None:
    """Replace a hub's name of a model by the folder of its files, once, before every worker asks the hub itself.

    Raises:
        ConfigurationError: the files can be had neither from the client's cache nor from the hub.
    """
    from omegaconf import OmegaConf

    from overlay import ConfigurationError
    from post_training.hub import HubError, download_commands, is_hub_name, snapshot

    keys = ["actor_rollout_ref.model.path"]
    if config.algorithm.adv_estimator == "gae":
        keys += ["critic.model.path", "critic.model.tokenizer_path"]
    for key in keys:
        path = OmegaConf.select(config, key)
        if not isinstance(path, str) or not is_hub_name(path):
            continue
        try:
            OmegaConf.update(config, key, str(snapshot(path)))
        except HubError as error:
            commands = download_commands(path, "model", path)
            raise ConfigurationError(
                f"{key}={path} is invalid: {error}. Set it to a folder with the model's files: {commands}"
            ) from error


def _filled(config: DictConfig) -> DictConfig:
    """Complete a user's whole configuration that is based on neither of verl's two; others have the keys already."""
    return config if "overlay" in config.actor_rollout_ref else completed(config)


def completed(config: Mapping[str, Any]) -> DictConfig:
    """Add to a configuration of verl's the overlay's keys, and further missing keys with their values for NPUs.

    Keys that it already has keep their values.
    """
    from omegaconf import OmegaConf

    from verl_patches.features.settings import overlay_defaults
    from verl_patches.trainer.configuration_checks.backends import backend_of

    started = {"ray_init": {"address": "auto", "temp_dir": None}}
    parts: list[Any] = [overlay_defaults(), started]
    if backend_of(config) == "fsdp":
        parts.append(OmegaConf.load(main_ppo.CONFIG_FOLDER / "fsdp_on_npu.yaml"))
    else:
        megatron: Any = OmegaConf.load(_OURS / "ppo_megatron_trainer.yaml")
        del megatron["defaults"]
        parts.append(megatron)
    merged: Any = OmegaConf.merge(*parts, config)
    OmegaConf.set_struct(merged, True)
    return main_ppo.translated(merged)


if __name__ == "__main__":
    sys.exit(main())
