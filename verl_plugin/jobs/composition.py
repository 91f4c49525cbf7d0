"""Composes a job as `verl.trainer.main_ppo` does with the same --config-path and --config-name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_plugin.jobs.types import type_problems

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_FOLDER = Path(__file__).resolve().parents[1] / "config"
# Files that several jobs share, and that are no jobs themselves.
_SHARED = ("all_jobs", "cluster", "megatron")
_UNKNOWN = re.compile(r"Could not override '([^']+)'|Could not delete from config\. '([^']+)'")


class JobError(ValueError):
    """A job cannot run; the message is one sentence."""


def job_names() -> list[str]:
    """Return the names of the jobs that have a file."""
    return sorted(path.stem for path in CONFIG_FOLDER.glob("*.yaml") if path.stem not in _SHARED)


def compose_job(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Return the configuration of a job, with Hydra overrides applied.

    Args:
        name: of a file in `verl_plugin/config`, without its suffix.
        overrides: Hydra's, as verl's command line takes them.

    Raises:
        JobError: there is no such job or key, an override cannot be read, or its value is of a wrong type.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if name not in job_names():
        raise JobError(f"--config-name={name} is invalid: no such job. Set it to {' or '.join(job_names())}.")
    with initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base=None):
        try:
            config = compose(name, list(overrides))
            plain: Any = OmegaConf.to_container(config, resolve=True)
            problems = type_problems(plain, _own_values(name))
        except OverrideParseException as error:
            raise JobError(
                f"{error.override} is invalid: Hydra cannot read it. Set it as KEY=VALUE, with quotes around a value "
                "with special characters."
            ) from error
        except (HydraException, OmegaConfBaseException) as error:
            raise JobError(_sentence(str(error), compose(name))) from error
        except ValueError as error:  # Hydra takes the key of a group for the choice of its file
            groups = " or ".join(each for each in overrides if "." not in each.partition("=")[0])
            raise JobError(f"{groups} is invalid: not a group of keys. Set its keys, one by one.") from error
    for problem in problems:
        raise JobError(problem)
    return config


@cache
def _own_values(name: str) -> dict[str, Any]:
    """Return the values of a job without overrides."""
    from hydra import compose
    from omegaconf import OmegaConf

    own: Any = OmegaConf.to_container(compose(name), resolve=True)
    return own


def _sentence(said: str, config: DictConfig) -> str:
    """Return Hydra's error as one sentence; for an unknown key it suggests the closest one."""
    found = _UNKNOWN.search(said)
    if found is None:
        return said.strip().splitlines()[0]
    key = found[1] or found[2]
    close = get_close_matches(key, list(_keys(config)), n=1, cutoff=0.75)
    remedy = f"Set {close[0]} instead" if close else f"Set +{key}, if verl reads it"
    return f"{key} is invalid: verl's configuration has no such key. {remedy}."


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    from omegaconf import DictConfig, OmegaConf

    for name in node:
        yield f"{prefix}{name}"
        if not OmegaConf.is_missing(node, name) and not OmegaConf.is_interpolation(node, name):
            child = node._get_node(name)
            if isinstance(child, DictConfig) and not child._is_none():
                yield from _keys(child, f"{prefix}{name}.")
