"""Holds one process of a training at one place until it is killed there.

The place is read from `stop.json` in the run's folder; the process that reaches it writes `stop.reached` and waits. The
process that started the run then kills the victim of the point. `install` is called in the process that Ray's workers
are forked from.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from post_training.checkpoint import durable
from post_training.hang_detection.signs import Signs
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.training_checkpoint import saving, trainer
from verl_patches.features.training_checkpoint.step_folders import step_of

STOP_NAME, REACHED_NAME = "stop.json", "stop.reached"
BEFORE_RENAME, AFTER_RENAME, CHUNK, FILE = "before the rename", "after the rename", "write", "file written"
# A held process that nobody kills ends by itself.
_HELD_S = 600.0


@dataclass(frozen=True)
class Stop:
    """A place at which one process stops.

    Attributes:
        place: a phase of the hang detector, or one of the four places of this module.
        step: of the run.
        rank: of the worker that stops; -1 is the driver's loop.
        number: which write of the step's checkpoint, from 1.
    """

    place: str
    step: int
    rank: int
    number: int = 1

    def write(self, folder: Path) -> None:
        """Ask the run in `folder` to stop here; to be called before it starts."""
        (folder / STOP_NAME).write_text(json.dumps(asdict(self)))


_entered: Counter[str] = Counter()
_written: Counter[str] = Counter()
# The step whose file this process is writing, whatever the phase and the thread.
_writing: list[int] = []


def reach(place: str, step: int, number: int = 1) -> None:
    """Stop this process if this is the place that was asked for; it then never returns."""
    folder = MEASURE.current().output_dir
    if not folder or not (file := Path(folder) / STOP_NAME).is_file():
        return
    here = Stop(place, step, int(os.environ.get("RANK", -1)), number)
    if Stop(**json.loads(file.read_text())) != here:
        return
    unfinished = Path(folder) / f"{REACHED_NAME}.{os.getpid()}"
    unfinished.write_text(json.dumps({"pid": os.getpid()}))
    unfinished.rename(Path(folder) / REACHED_NAME)
    time.sleep(_HELD_S)
    sys.exit(f"the process to kill at {here} was not killed")


def install() -> None:
    """Wrap the functions of this process so that they call `reach`."""
    phase: Callable[..., Any] = Signs.phase

    @contextmanager
    def noticed(self: Signs, name: str) -> Iterator[None]:
        with phase(self, name):
            _entered[name] += 1
            reach(name, _entered[name])
            yield

    Signs.phase = noticed  # type: ignore[method-assign]  # of this process, which is to be killed
    saving.write_file = _of_its_step(saving.write_file)
    durable._write_all = _counted(durable._write_all, CHUNK)
    durable.sync_folder = _counted(durable.sync_folder, FILE)
    publish = trainer.publish_step

    def published(root: Path, step: int) -> None:
        reach(BEFORE_RENAME, step)
        publish(root, step)
        reach(AFTER_RENAME, step)

    trainer.publish_step = published


def _of_its_step(write: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a rank's `write` of its file, so that the places inside know its step."""

    def noticed(path: Path, *arguments: Any) -> Any:
        _written.clear()
        _writing.append(step_of(path.parents[1].with_suffix("")))
        try:
            return write(path, *arguments)
        finally:
            _writing.pop()

    return noticed


def _counted(operation: Callable[..., None], place: str) -> Callable[..., None]:
    """Wrap an `operation` on a file: a place comes before it if the file is a rank's own of a checkpoint."""

    def noticed(*arguments: Any) -> None:
        if _writing:
            _written[place] += 1
            reach(place, _writing[-1], _written[place])
        operation(*arguments)

    return noticed
