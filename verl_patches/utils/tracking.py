"""Patches of verl's tracking: trackers continue after a resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.tracking.feature import TRACKING

if TYPE_CHECKING:
    from verl.utils.tracking import Tracking

_TRACKING = "verl.utils.tracking:Tracking"


@wrap(
    f"{_TRACKING}.__init__",
    evidence="executed",
    relies_on=["verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit"],
    why="verl creates its trackers before it reads the checkpoint to resume, so each start is a new run; SwanLab asks "
    "for a login in the middle of a run, and one failing tracker ends the training",
    feature=TRACKING,
    upstream="docs/upstream/verl-tracking-runs.md",
    remove_when="the pinned verl keeps its trackers' run ids in its checkpoints and ends the runs as it ends itself",
)
def init(
    upstream: Callable[..., None],
    self: Tracking,
    project_name: str,
    experiment_name: str,
    default_backend: str | list[str] = "console",
    config: dict[str, Any] | None = None,
) -> None:
    from pathlib import Path

    from verl_patches.features.tracking import run

    def make(name: str, known: Mapping[str, Any] | None) -> None:
        upstream(self, project_name, experiment_name, [name], known)

    names = [default_backend] if isinstance(default_backend, str) else default_backend
    folder = MEASURE.current().output_dir
    run.begin(run.RunTrackers(self, make, names, config or {}, Path(folder) if folder else None))


@wrap(
    f"{_TRACKING}.log",
    evidence="executed",
    why="a resumed run sends its trackers steps that they already have, and a tracker that dies or rejects a value "
    "ends the training",
    feature=TRACKING,
    upstream="docs/upstream/verl-tracking-runs.md",
    remove_when="the pinned verl keeps its trackers' run ids in its checkpoints and ends the runs as it ends itself",
)
def log_where_it_is_new(
    upstream: Callable[..., None], self: Tracking, data: dict[str, Any], step: int, backend: list[str] | None = None
) -> None:
    from verl_patches.features.tracking.run import process_trackers

    process_trackers().log(lambda name, metrics: upstream(self, data=metrics, step=step, backend=[name]), data, step)


@wrap(
    f"{_TRACKING}.__del__",
    why="verl ends its trackers' runs as successful whatever happened, MLflow's never, and raises where one was "
    "rejected; here they have ended with the training loop",
    feature=TRACKING,
    upstream="docs/upstream/verl-tracking-runs.md",
    remove_when="the pinned verl keeps its trackers' run ids in its checkpoints and ends the runs as it ends itself",
)
def delete(upstream: Callable[..., None], self: Tracking) -> None:
    if "logger" in vars(self):  # upstream has made trackers by itself
        upstream(self)
