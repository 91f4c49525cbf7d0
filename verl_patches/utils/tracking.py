"""verl's tracking: a file of JSON lines without metrics that would be made up, and trackers that survive a resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features import settings
from verl_patches.features.alerts.feature import ALERTS
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.tracking.feature import TRACKING
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT

if TYPE_CHECKING:
    from verl.utils.tracking import Tracking

_TRACKING = "verl.utils.tracking:Tracking"
_OWN_RUNS = {
    "feature": TRACKING,
    "upstream": "docs/upstream/verl-tracking-runs.md",
    "remove_when": "the pinned verl keeps its trackers' run ids in its checkpoints and ends the runs as it ends itself",
}


@wrap(
    f"{_TRACKING}.__init__",
    evidence="executed",
    relies_on=["verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit"],
    why="verl makes its trackers before it reads the checkpoint that it goes on from, so that each start is a new run; "
    "SwanLab asks for a login in the middle of a run, and one tracker that fails ends the training",
    **_OWN_RUNS,
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
    folder = settings.current().measure.output_dir
    run.begin(run.RunTrackers(self, make, names, config or {}, Path(folder) if folder else None))


@wrap(
    f"{_TRACKING}.log",
    evidence="executed",
    why="a resumed run gives its trackers steps that they have, and a tracker that dies or refuses a value ends the "
    "training",
    **_OWN_RUNS,
)
def log_where_it_is_new(
    upstream: Callable[..., None], self: Tracking, data: dict[str, Any], step: int, backend: list[str] | None = None
) -> None:
    from verl_patches.features.tracking.run import process_trackers

    process_trackers().log(lambda name, metrics: upstream(self, data=metrics, step=step, backend=[name]), data, step)


@wrap(
    f"{_TRACKING}.__del__",
    why="verl ends its trackers' runs as good ones whatever happened, MLflow's never, and raises where one was "
    "refused; here they have ended with the training loop",
    **_OWN_RUNS,
)
def delete(upstream: Callable[..., None], self: Tracking) -> None:
    if "logger" in vars(self):  # trackers that upstream has made by itself
        upstream(self)


@wrap(
    f"{_TRACKING}.log",
    feature=MEASURE,
    evidence="executed",
    why="the summary and the live display read metrics.jsonl; verl derives some metrics from an absent old_log_prob",
    upstream="not forwarded: part of this project's features",
    remove_when="never: it is this project's own record",
    outside=["tracking"],
)
def log(
    upstream: Callable[..., None], self: Tracking, data: dict[str, Any], step: int, backend: list[str] | None = None
) -> None:
    import overlay
    from verl_patches.features.measure.reported_names import true_metrics
    from verl_patches.features.measure.run_end import process_faults
    from verl_patches.features.measure.run_files import RunFiles
    from verl_patches.features.measure.samples import take_samples
    from verl_patches.features.training_checkpoint.trainer import process_publisher

    current = settings.current()
    metrics = true_metrics(data, old_log_prob_computed=current.recompute_old_log_prob)
    files = RunFiles(current.measure.output_dir)
    if not 0 < step <= process_publisher().previous:  # verl validates once more as it goes on after a step
        files.step(step, metrics)
    files.executed(overlay.executed())
    files.samples(step, take_samples())
    process_faults().logged(step, metrics, files)
    return upstream(self, data=metrics, step=step, backend=backend)


@wrap(
    f"{_TRACKING}.log",
    feature=TRAINING_CHECKPOINT,
    evidence="executed",
    why="verl saves a step before it logs it; a checkpoint with its final name whose step has no metrics would leave a "
    "hole in the records of the run that goes on from it",
    upstream="not forwarded: part of this project's features",
    remove_when="verl logs a step before it saves it",
    outside=["measure"],
)
def log_then_publish(
    upstream: Callable[..., Any], self: Tracking, data: dict[str, Any], step: int, backend: list[str] | None = None
) -> Any:
    logged = upstream(self, data=data, step=step, backend=backend)
    from verl_patches.features.training_checkpoint.trainer import process_publisher

    process_publisher().logged(step, data)
    return logged


@wrap(
    f"{_TRACKING}.log",
    feature=ALERTS,
    why="a metric that is not what it should be is said as its step is logged; a run that it ends has logged the step",
    upstream="not forwarded: part of this project's features",
    remove_when="never: it is this project's own record",
    outside=["training_checkpoint"],
)
def log_with_alerts(
    upstream: Callable[..., Any], self: Tracking, data: dict[str, Any], step: int, backend: list[str] | None = None
) -> Any:
    from verl_patches.features.alerts.watcher import StoppedByAlert, process_alerts
    from verl_patches.features.training_checkpoint.trainer import process_publisher

    # First, so that the checkpoint of the step knows of it; verl validates once more as it goes on after a step.
    stop = process_alerts().take(step, data) if step > process_publisher().previous else ""
    logged = upstream(self, data=data, step=step, backend=backend)
    if stop:
        raise StoppedByAlert(stop)
    return logged
