"""What the trackers of `trainer.logger` need on the machine of the driver: their packages and their credentials.

verl builds them after every model has been loaded, and one that asks for a login waits for ever. The variables are
those that each tracker's own client reads.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from overlay import ConfigurationError


@dataclass(frozen=True)
class Tracker:
    """What one needs. `ready` says whether it would start without asking anybody; `remedy` what to do otherwise."""

    package: str
    ready: Callable[[], bool] = lambda: True
    remedy: str = ""


def _variable(name: str, *values: str) -> bool:
    given = os.environ.get(name, "")
    return given.lower() in values if values else bool(given)


def _has_login(host: str, *files: str) -> bool:
    """Whether one of the files with logins, in netrc's form, has one for `host`."""
    for file in (os.environ.get("NETRC", ""), *files):
        try:
            if file and netrc.netrc(str(Path(file).expanduser())).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _wandb_is_ready() -> bool:
    offline = _variable("WANDB_MODE", "offline", "disabled", "dryrun")
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("//")[2].partition("/")[0]
    return offline or _variable("WANDB_API_KEY") or _has_login(host, "~/.netrc", "~/_netrc")


def _swanlab_is_ready() -> bool:
    stored = Path(os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab").expanduser() / ".netrc"
    return _variable("SWANLAB_MODE", "local", "offline", "disabled") or _variable("SWANLAB_API_KEY") or stored.exists()


def _clearml_is_ready() -> bool:
    file = Path(os.environ.get("CLEARML_CONFIG_FILE") or "~/clearml.conf").expanduser()
    return (_variable("CLEARML_API_ACCESS_KEY") and _variable("CLEARML_API_SECRET_KEY")) or file.exists()


def _vemlp_is_ready() -> bool:
    return all(map(_variable, ("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY", "MLP_TRACKING_REGION")))


_WANDB = Tracker("wandb", _wandb_is_ready, "set WANDB_API_KEY, or WANDB_MODE=offline")
TRACKERS = {
    "wandb": _WANDB,
    "tracking": _WANDB,
    "mlflow": Tracker("mlflow"),
    "swanlab": Tracker("swanlab", _swanlab_is_ready, "set SWANLAB_API_KEY, or SWANLAB_MODE=offline (or local)"),
    "vemlp_wandb": Tracker(
        "volcengine_ml_platform",
        _vemlp_is_ready,
        "set VOLC_ACCESS_KEY_ID, VOLC_SECRET_ACCESS_KEY and MLP_TRACKING_REGION",
    ),
    "tensorboard": Tracker("tensorboard"),
    "clearml": Tracker("clearml", _clearml_is_ready, "set CLEARML_API_ACCESS_KEY and CLEARML_API_SECRET_KEY"),
}


def check_trackers(config: Mapping[str, Any]) -> None:
    """Every tracker can be imported and would start without asking for a login."""
    given = config["trainer"]["logger"]
    for name in [given] if isinstance(given, str) else given:
        tracker = TRACKERS.get(name)
        if tracker is None:  # the console
            continue
        key = f"trainer.logger has {name}"
        if find_spec(tracker.package) is None:
            raise ConfigurationError(
                f"{key}, and its package {tracker.package} is not installed in this environment; install it, or take "
                f"{name} out of trainer.logger"
            )
        if not tracker.ready():
            raise ConfigurationError(f"{key}, which has no login here; {tracker.remedy}, or take it out of the list")
