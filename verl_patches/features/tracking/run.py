"""The trackers of the run that this process drives, between verl's Tracking and their clients."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from post_training.masking import masked
from post_training.process_context import process_context
from verl_patches.features.tracking.backends import MLFLOW_STATUS, Ending, backend, set_variables
from verl_patches.features.training_checkpoint.kept_states import process_kept_states

RECORD = "trackers.json"
"""File in the run's folder with each tracker's run id and the last step that it got."""

CONSOLE = "console"


class RunTrackers:
    """Opens trackers when they are first needed, which is after verl has read the checkpoint that it resumes from.

    Args:
        tracking: verl's Tracking; `tracking.logger` maps a tracker's name to verl's logger.
        make: verl's constructor for one tracker, by its name in verl and the configuration for it; fills
            `tracking.logger`.
        names: of the trackers.
        config: the run's configuration, plain.
        folder: the run's folder; None if it has none.
    """

    def __init__(
        self,
        tracking: Any,
        make: Callable[[str, Mapping[str, Any] | None], None],
        names: Iterable[str],
        config: Mapping[str, Any],
        folder: Path | None,
    ):
        self.tracking, self._make, self._folder = tracking, make, folder
        self._names, self._config = tuple(names), masked(config)
        self._resumed: dict[str, str] = {}
        self._resumed_step: int | None = None
        self._record: dict[str, dict[str, Any]] = {}
        self._logged = 0
        self._open = False
        tracking.logger = {}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint with this `state`."""
        self._resumed, self._resumed_step = dict(state["runs"]), state["step"]

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the step that was logged last, and the runs' ids by tracker."""
        self._ensure_open()
        runs = {name: entry["run"] for name, entry in self._record.items() if entry["run"]}
        return {"step": self._logged, "runs": runs}

    def log(self, send: Callable[[str, Mapping[str, Any]], None], metrics: Mapping[str, Any], step: int) -> None:
        """Log a step to every tracker that does not have it; `send` is verl's call for one tracker."""
        self._ensure_open()
        for name in list(self.tracking.logger):
            entry = self._record[name]
            if name != CONSOLE and entry["step"] is not None and step <= entry["step"]:
                continue
            with self._dropped_where_it_fails(name):
                send(name, metrics if name == CONSOLE else backend(name).values(metrics))
                entry["step"] = step
        self._logged = step
        self._write_record()

    def close(self, ending: Ending) -> None:
        """End every run; nothing can be logged afterwards."""
        for name, logger in list(self.tracking.logger.items()):
            with self._dropped_where_it_fails(name):
                backend(name).end(logger, ending)
        self.tracking.logger = {}
        self._names, self._open = (), True

    def _ensure_open(self) -> None:
        if self._open:
            return
        self._open = True
        made: dict[str, Any] = {}
        known = self._read_record()
        for name in self._names:
            with self._dropped_where_it_fails(name):
                made |= self._opened(name, known.get(name, {}))
        self.tracking.logger = made

    def _opened(self, name: str, known: Mapping[str, Any]) -> dict[str, Any]:
        """Open one tracker; return verl's logger of it under its name. `known`: the record of an earlier start."""
        kind, run = backend(name), self._resumed.get(name)
        set_variables(kind.defaults(self._folder or Path.cwd()), only_absent=True)
        if run is not None:
            set_variables(kind.resuming(run), only_absent=False)
        # A resumed run keeps the configuration that it began with: MLflow rejects another one.
        self._make(name, None if run is not None and name == "mlflow" else self._config)
        ((actual, logger),) = self.tracking.logger.items()
        last = self._resumed_step
        if last is not None and kind.purge is not None:
            kind.purge(logger, last)
        elif last is not None and run is not None and known.get("run") == run and kind.keeps:
            last = max(last, known.get("step") or last)  # the killed run has logged steps that are trained again
        self._record[actual] = {"run": kind.run_id(), "step": last}
        return {actual: logger}

    @contextmanager
    def _dropped_where_it_fails(self, name: str) -> Iterator[None]:
        """Drop a tracker that raises within this context, with a warning; the training goes on."""
        try:
            yield
        except Exception as error:
            self.tracking.logger.pop(name, None)
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            print(f"warning: the tracker {name} failed and is now off ({reason})", file=sys.stderr, flush=True)

    def _read_record(self) -> dict[str, dict[str, Any]]:
        file = self._folder / RECORD if self._folder else None
        try:
            return json.loads(file.read_text()) if file is not None else {}
        except (OSError, ValueError):  # none yet
            return {}

    def _write_record(self) -> None:
        if self._folder is None or not self._folder.is_dir():
            return
        unfinished = self._folder / f"{RECORD}.{os.getpid()}"
        unfinished.write_text(json.dumps(self._record, indent=1) + "\n")
        unfinished.replace(self._folder / RECORD)


def begin(trackers: RunTrackers) -> None:
    """Make these the trackers of this process, and keep their run ids in its checkpoints."""
    process_context().keep(trackers)
    process_kept_states().register("trackers", trackers.state, trackers.go_on)


def process_trackers() -> RunTrackers:
    """Return the trackers of the run in this process, set by `begin`."""
    trackers = process_context().find(RunTrackers)
    assert trackers is not None, "verl's Tracking has not begun a run"
    return trackers


@contextmanager
def closed_at_the_end() -> Iterator[None]:
    """End the runs of this process's trackers as this context ends: normally, by an exception, or by a signal."""
    ending: Ending = "killed"
    try:
        yield
        ending = "finished"
    except Exception:
        ending = "failed"
        raise
    finally:
        trackers = process_context().find(RunTrackers)
        if trackers is not None:
            trackers.close(ending)


def end_left_run(folder: Path, ending: Ending) -> None:
    """End MLflow's run if the training's process left it RUNNING, as when it was killed; other trackers have no such
    state.

    Called by a process that outlives the training. Does nothing if the run has ended, or if there is none.
    """
    try:
        run = json.loads((folder / RECORD).read_text())["mlflow"]["run"]
    except (OSError, ValueError, KeyError):
        return
    set_variables(backend("mlflow").defaults(folder), only_absent=True)
    from mlflow import MlflowClient

    client = MlflowClient()
    if client.get_run(run).info.status == "RUNNING":
        client.set_terminated(run, MLFLOW_STATUS[ending])
