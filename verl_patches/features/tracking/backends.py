"""Settings of verl's trackers that verl does not make: folders, offline modes, run ids, and how to end a run.

All of them are passed by the environment variables that the clients themselves read (MLflow's tracking URI and run id,
W&B's and SwanLab's folder, mode, run id and resume), so that verl's own code makes the runs.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Ending = Literal["finished", "failed", "killed"]
Variables = dict[str, str]
MLFLOW_STATUS: Mapping[Ending, str] = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}


def _no_variables(*_: object) -> Variables:
    return {}


@dataclass(frozen=True)
class Backend:
    """One of verl's trackers.

    Attributes:
        defaults: returns variables to set if they are absent, for the run's folder.
        resuming: returns variables with which the client resumes the run with an id.
        run_id: returns the id of the run that verl has made; None if runs have none.
        end: closes the run, from verl's logger and how it ended; the default leaves that to verl.
        purge: invalidates steps after a given one, which the run before a resume has logged; None if the tracker cannot
            take steps back.
        keeps: whether logged steps survive if the process is killed; otherwise a resumed run logs them again.
        takes_nan: whether values that are not finite are sent.
        name: returns the tracker's form of a metric's name.
    """

    defaults: Callable[[Path], Variables] = _no_variables
    resuming: Callable[[str], Variables] = _no_variables
    run_id: Callable[[], str | None] = lambda: None
    end: Callable[[Any, Ending], None] = lambda logger, ending: None
    purge: Callable[[Any, int], None] | None = None
    keeps: bool = True
    takes_nan: bool = True
    name: Callable[[str], str] = lambda name: name

    def values(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers among the metrics, in the tracker's form."""
        numbers = {self.name(name): as_number(value) for name, value in metrics.items()}
        return {
            name: value
            for name, value in numbers.items()
            if value is not None and (self.takes_nan or math.isfinite(value))
        }


def as_number(value: Any) -> float | int | None:
    """Return `value` as a Python number; None if it is not a number."""
    if getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    return value if isinstance(value, int | float) else None


def _module(name: str) -> Any:
    """Return a client that verl has imported."""
    return sys.modules[name]


def _wandb_defaults(folder: Path) -> Variables:
    from verl_patches.features.tracking.logins import has_wandb_login

    return {"WANDB_DIR": str(folder)} | ({} if has_wandb_login() else {"WANDB_MODE": "offline"})


def _swanlab_defaults(folder: Path) -> Variables:
    from verl_patches.features.tracking.logins import has_swanlab_login

    return {"SWANLAB_LOG_DIR": str(folder / "swanlog")} | ({} if has_swanlab_login() else {"SWANLAB_MODE": "offline"})


def _close_tensorboard(adapter: Any, ending: Ending) -> None:
    adapter.finish()


def _purge_tensorboard(adapter: Any, step: int) -> None:
    """Take back events after `step`: torch's writer marks that at the head of the file that it opens next."""
    adapter.writer.close()
    adapter.writer.purge_step = step + 1


def _end_mlflow(adapter: Any, ending: Ending) -> None:
    _module("mlflow").end_run(MLFLOW_STATUS[ending])


def _end_wandb(wandb: Any, ending: Ending) -> None:
    wandb.finish(exit_code=0 if ending == "finished" else 1)


def _end_swanlab(swanlab: Any, ending: Ending) -> None:
    state = {"finished": "success", "failed": "crashed", "killed": "aborted"}[ending]
    swanlab.finish(state=state, error=None if ending == "finished" else f"the run {ending}")


BACKENDS: Mapping[str, Backend] = {
    "console": Backend(),
    "tensorboard": Backend(
        defaults=lambda folder: {"TENSORBOARD_DIR": str(folder / "tensorboard")},
        end=_close_tensorboard,
        purge=_purge_tensorboard,
    ),
    "mlflow": Backend(
        defaults=lambda folder: {"MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}"},
        resuming=lambda run: {"MLFLOW_RUN_ID": run},
        run_id=lambda: _module("mlflow").active_run().info.run_id,
        end=_end_mlflow,
        # The characters that MLflow allows; verl replaces @ itself.
        name=lambda name: re.sub(r"[^\w\-./: @]", "_", name),
    ),
    "wandb": Backend(
        defaults=_wandb_defaults,
        resuming=lambda run: {"WANDB_RUN_ID": run, "WANDB_RESUME": "allow"},
        run_id=lambda: _module("wandb").run.id,
        end=_end_wandb,
        keeps=False,  # as with SwanLab
    ),
    "swanlab": Backend(
        defaults=_swanlab_defaults,
        resuming=lambda run: {"SWANLAB_RUN_ID": run, "SWANLAB_RESUME": "allow"},
        run_id=lambda: _module("swanlab").get_run().id,
        end=_end_swanlab,
        keeps=False,  # its file is written when a buffer is full
        takes_nan=False,
    ),
}


def backend(name: str) -> Backend:
    """Return the tracker of that name; one that is not known here is left entirely to verl."""
    return BACKENDS.get("wandb" if name == "tracking" else name, Backend())


def set_variables(variables: Variables, only_absent: bool) -> None:
    """Put variables into this process's environment, which the clients read."""
    for name, value in variables.items():
        if not (only_absent and os.environ.get(name)):
            os.environ[name] = value
