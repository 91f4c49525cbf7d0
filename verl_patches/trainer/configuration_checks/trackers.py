"""Checks that the driver's machine has the packages and credentials of the trackers in `trainer.logger`.

verl builds them after every model has been loaded, and a tracker that asks for a login waits forever. The environment
variables are those that each tracker's own client reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from overlay import ConfigurationError
from verl_patches.features.settings import OverlaySettings
from verl_patches.features.tracking.logins import has_swanlab_login, has_variable, has_wandb_login


@dataclass(frozen=True)
class Tracker:
    """Requirements of one tracker.

    Attributes:
        package: the package that it imports.
        ready: whether it would start without asking for a login.
        remedy: what to do if it would not.
        offline: with overlay.tracking it stays offline if it is not ready.
    """

    package: str
    ready: Callable[[], bool] = lambda: True
    remedy: str = ""
    offline: bool = False


def _clearml_is_ready() -> bool:
    file = Path(os.environ.get("CLEARML_CONFIG_FILE") or "~/clearml.conf").expanduser()
    return (has_variable("CLEARML_API_ACCESS_KEY") and has_variable("CLEARML_API_SECRET_KEY")) or file.exists()


def _vemlp_is_ready() -> bool:
    return all(map(has_variable, ("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY", "MLP_TRACKING_REGION")))


_WANDB = Tracker("wandb", has_wandb_login, "set WANDB_API_KEY, or WANDB_MODE=offline", offline=True)
TRACKERS = {
    "wandb": _WANDB,
    "tracking": _WANDB,
    "mlflow": Tracker("mlflow"),
    "swanlab": Tracker(
        "swanlab", has_swanlab_login, "set SWANLAB_API_KEY, or SWANLAB_MODE=offline (or local)", offline=True
    ),
    "vemlp_wandb": Tracker(
        "volcengine_ml_platform",
        _vemlp_is_ready,
        "set VOLC_ACCESS_KEY_ID, VOLC_SECRET_ACCESS_KEY and MLP_TRACKING_REGION",
    ),
    "tensorboard": Tracker("tensorboard"),
    "clearml": Tracker("clearml", _clearml_is_ready, "set CLEARML_API_ACCESS_KEY and CLEARML_API_SECRET_KEY"),
}


def check_trackers(config: Mapping[str, Any]) -> None:
    """Check that every tracker can be imported and would start without asking for a login."""
    given = config["trainer"]["logger"]
    stays_offline = OverlaySettings.from_config(config["actor_rollout_ref"]).tracking.enabled
    for name in [given] if isinstance(given, str) else given:
        tracker = TRACKERS.get(name)
        if tracker is None:  # the console
            continue
        key = f"trainer.logger has {name}"
        if find_spec(tracker.package) is None:
            raise ConfigurationError(
                f"{key}, but its package {tracker.package} is not installed in this environment. Install it, or remove "
                f"{name} from trainer.logger"
            )
        if not tracker.ready() and not (tracker.offline and stays_offline):
            raise ConfigurationError(f"{key}, which has no login here: {tracker.remedy}, or remove it from the list")
