"""Runs of the user's configuration, scaled down to emulated dies: unbroken, killed at a point, and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from post_training.overrides import setting
from post_training.processes.command import SignalFlag, run_to_the_end
from post_training.processes.descendants import descendants
from rehearsal.emulated_dies import remove_emulated_dies
from rehearsal.plan import ROOT, run_environment
from rehearsal.resume_proof.points import Killed, Point
from rehearsal.resume_proof.stops import REACHED_NAME, STOP_NAME
from verl_patches.features.training_checkpoint.step_folders import newest_step
from verl_patches.trainer.isolated_ray import private_folder

MOST_DIES = 8
STEPS = 3
BATCH = 8
_CAPACITY_MB = 1024


class ProofError(Exception):
    """A run did not do what it was started for; the message is one sentence that names `log`, the run's output."""

    def __init__(self, sentence: str, log: Path) -> None:
        super().__init__(f"{sentence}; see {log}")


@dataclass(frozen=True)
class Shrunk:
    """A scaled-down configuration and the folder of its runs.

    Attributes:
        name: of the configuration.
        overrides: Hydra overrides; the user's own come last.
        dies: number of emulated dies.
        folder: parent of the runs' folders.
        limit_s: seconds that a run may take.
    """

    name: str
    overrides: tuple[str, ...]
    dies: int
    folder: Path
    limit_s: float

    @property
    def asked(self) -> str:
        """The configuration of the runs as text; it identifies the runs of an earlier command."""
        return json.dumps([self.name, *self.overrides])

    def train(self, place: str, while_running: Callable[[], None], resumes: bool, signals: SignalFlag) -> int:
        """Train in `folder/place`; return the exit status, negative for a signal."""
        folder = self.folder / place
        folder.mkdir(parents=True, exist_ok=True)
        own = [
            setting("trainer.default_local_dir", folder / "checkpoints"),
            setting("actor_rollout_ref.overlay.measure.output_dir", folder),
            f"trainer.resume_mode={'auto' if resumes else 'disable'}",
        ]
        command = [sys.executable, "-m", "rehearsal.resume_proof.training", "--config-name", self.name]
        until = time.monotonic() + self.limit_s

        def watched() -> None:
            while_running()
            if time.monotonic() > until:
                raise ProofError(f"a run did not finish within {self.limit_s:.0f} s", folder / "run.log")

        with private_folder("proof", on_removal=remove_emulated_dies) as private:
            environment = self._environment(private)
            line = [*command, *self.overrides, *own]
            return run_to_the_end(line, environment, folder, folder / "run.log", signals, watched)

    def _environment(self, private: Path) -> dict[str, str]:
        return run_environment(self.overrides) | {
            "PYTHONPATH": str(ROOT),
            "NPU_EMULATOR_DEVICES": str(self.dies),
            "NPU_EMULATOR_CAPACITY_MB": str(_CAPACITY_MB),
            # Dies of its own: leftovers of a killed run take none of the next one's memory.
            "NPU_EMULATOR_NODE": private.name,
            "TMPDIR": str(private),
        }


def train_unbroken(shrunk: Shrunk, signals: SignalFlag) -> Path:
    """Train without a break and return the folder of the run, with which the others are compared.

    A run that the same command has completed is reused; one of another command, or an interrupted one, is replaced.
    """
    folder, said = shrunk.folder / "unbroken", shrunk.folder / "unbroken.json"
    if said.is_file() and said.read_text() == shrunk.asked:
        return folder
    said.unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    status = shrunk.train("unbroken", lambda: None, False, signals)
    if status != 0:
        raise ProofError(f"the unbroken run ended with {status}", folder / "run.log")
    said.write_text(shrunk.asked)
    return folder


def train_killed(shrunk: Shrunk, place: str, point: Point, signals: SignalFlag) -> int:
    """Kill a run at a point and resume it; return the step that it resumed from, 0 if it began again.

    Raises:
        ProofError: the run never reached the point, ended with status 0 though it was killed, or failed once resumed.
    """
    folder = shrunk.folder / place
    folder.mkdir(parents=True)
    point.stop.write(folder)
    done: list[float] = []

    def kill() -> None:
        reached = folder / REACHED_NAME
        if not done and reached.is_file():
            kill_one(point.killed, json.loads(reached.read_text())["pid"])
            done.append(time.monotonic())

    status = shrunk.train(place, kill, False, signals)
    if not done:
        raise ProofError(f"the run ended with {status} before {point}", folder / "run.log")
    if status == 0:
        raise ProofError(f"the run ended with 0 although the signal was sent to {point}", folder / "run.log")
    (folder / STOP_NAME).unlink()
    (folder / REACHED_NAME).unlink()
    step, _ = newest_step(folder / "checkpoints")
    status = shrunk.train(place, lambda: None, True, signals)
    if status != 0:
        raise ProofError(f"the resumed run ended with {status}", folder / "run.log")
    return step or 0


def kill_one(killed: Killed, reached: int) -> None:
    """Send the signal of a point.

    The command is the first of this process's descendants that trains; Ray's node process is known by its name.

    Args:
        killed: the victim.
        reached: the process that has reached the point's place.
    """
    below = descendants(os.getpid())
    if killed == "worker":
        os.kill(reached, signal.SIGKILL)
    elif killed == "raylet":
        (raylet,) = [process for process in below if _name(process) == "raylet"]
        os.kill(raylet, signal.SIGKILL)
    else:
        command = next(process for process in below if b"rehearsal.resume_proof.training" in _line(process))
        os.kill(command, signal.SIGTERM if killed == "SIGTERM" else signal.SIGKILL)


def _name(process: int) -> str:
    return _read(process, "comm").decode().strip()


def _line(process: int) -> bytes:
    return _read(process, "cmdline")


def _read(process: int, what: str) -> bytes:
    with ExitStack() as gone:
        gone.push(lambda kind, *_: kind is not None and issubclass(kind, OSError))
        return Path(f"/proc/{process}/{what}").read_bytes()
    return b""
