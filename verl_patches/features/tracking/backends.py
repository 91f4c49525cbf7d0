"""What verl's trackers need beside what verl gives them: where to write, offline modes, run ids, and how to end.

Everything is said through the variables that the clients themselves read (MLflow's tracking URI and run id, W&B's and
SwanLab's folder, mode, run id and resume), so that verl's own code makes the runs.
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
    """One tracker of verl's.

    defaults: variables to set where they are not, by the run's folder.
    resuming: variables with which the client goes on with a run, by its id.
    run_id: of the run that verl has made; None where runs have none.
    end: close the run, by verl's logger and how it ended; None leaves that to verl.
    purge: make what a resumed run has logged after a step invalid; None where steps cannot be taken back.
    keeps: whether what was logged is kept where the process is killed; else a resumed run logs it again.
    takes_nan: whether values that are not finite are sent.
    name: a metric's name as the tracker takes it.
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
        """The numbers among the metrics, as the tracker takes them."""
        numbers = {self.name(name): as_number(value) for name, value in metrics.items()}
        return {
            name: value
            for name, value in numbers.items()
            if value is not None and (self.takes_nan or math.isfinite(value))
        }


def as_number(value: Any) -> float | int | None:
    """`value` as Python's own number; None where it is none."""
    if getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    return value if isinstance(value, int | float) else None


def _module(name: str) -> Any:
    """A client that verl has imported."""
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
    """Events after `step` count as taken back: torch's writer says so at the head of the file that it opens next."""
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
        # The characters that MLflow takes; verl replaces @ itself.
        name=lambda name: re.sub(r"[^\w\-./: @]", "_", name),
    ),
    "wandb": Backend(
        defaults=_wandb_defaults,
        resuming=lambda run: {"WANDB_RUN_ID": run, "WANDB_RESUME": "allow"},
        run_id=lambda: _module("wandb").run.id,
        end=_end_wandb,
        keeps=False,  # as SwanLab's
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
    """The tracker of that name; of one that is not known here nothing but verl's own ways is used."""
    return BACKENDS.get("wandb" if name == "tracking" else name, Backend())


def set_variables(variables: Variables, only_absent: bool) -> None:
    """Put variables into this process's environment, which the clients read."""
    for name, value in variables.items():
        if not (only_absent and os.environ.get(name)):
            os.environ[name] = value
