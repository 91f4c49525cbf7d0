"""One start of a supervised run: its log, its status, what it wrote, and how long it may be silent."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from post_training.processes.command import SignalFlag, run_to_the_end
from post_training.report.nodes import SUPERVISION
from post_training.report.run_folder import CONFIGURATION, METRICS
from post_training.start_status import VARIABLE as STATUS_FILE
from post_training.start_status import StartStatus

KEPT = (CONFIGURATION, METRICS, "events.jsonl", "faults.jsonl", "samples.last.json", "overlay.json", SUPERVISION)
"""Files of the run that a bundle about a failure holds."""
_HEARTBEAT_S = 1.0
_END_OF_LOG_BYTES = 400_000


@dataclass(frozen=True)
class Start:
    """One start, and what it found in the run's folder, which tells its files from those of earlier starts.

    Attributes:
        log: What it prints.
        time: Unix seconds when it began. Entries of records carry a time too.
        files: Inode, size and time of change of each file that a start replaces as a whole. The file system's clock
            may be a server's, so these are compared with one another only.
    """

    log: Path
    time: float
    files: Mapping[str, tuple[int, int, int]]

    @classmethod
    def begin(cls, folder: Path) -> Start:
        """A start that begins now, with a log of its own in the run's folder."""
        files = {name: found for name in KEPT if (found := _identity(folder / name))}
        return cls(_new_log(folder), time.time(), files)

    @property
    def status_file(self) -> Path:
        """Where the launcher and the training keep their status."""
        return self.log.with_suffix(".status.json")

    @property
    def status(self) -> StartStatus:
        """What the launcher and the training last said of themselves."""
        return StartStatus.read(self.status_file)

    @property
    def is_worker(self) -> bool:
        """Whether this node gives its dies to another node's training."""
        return self.status.role == "worker"

    def wrote(self, file: Path) -> bool:
        """Whether this start has written the file."""
        found = _identity(file)
        return found is not None and found != self.files.get(file.name)

    def end_of_log(self) -> str:
        """The last 400,000 bytes of what it printed."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _END_OF_LOG_BYTES))
            return file.read().decode("utf-8", errors="replace")

    def end(self, code: int) -> dict[str, int]:
        """The fact that the record keeps of the end: of the whole training, or of this node's part."""
        return {"left" if self.is_worker else "ended": code}

    def run(
        self,
        command: Sequence[str],
        signals: SignalFlag,
        silence: Silence,
        silent_after: float,
        check: Callable[[], None] = lambda: None,
    ) -> int | None:
        """Run the command, with its output in the log and on the terminal.

        Args:
            command: Its words.
            signals: End the run, as `run_to_the_end` says.
            silence: Measures how long the training has shown no life.
            silent_after: Seconds of silence that end the run.
            check: Called while the command runs. What it raises ends the run, and is raised here.

        Returns:
            The exit status, None if the training hung.

        Raises:
            Interrupted: one of `signals` was received.
        """
        shown = 0

        def show() -> None:
            nonlocal shown
            with self.log.open("rb") as file:
                file.seek(shown)
                text = file.read()
            if text:
                shown += len(text)
                silence.output()
                os.write(sys.stdout.fileno(), text)
            elif silence.seconds() > silent_after and not self.is_worker:
                raise _Silent

        try:
            return run_to_the_end(
                command, {STATUS_FILE: str(self.status_file)}, Path.cwd(), self.log, signals, show, check
            )
        except _Silent:
            return None


class Silence:
    """How long a training has shown no life: neither output nor progress of a rank.

    A training whose hang detector is off keeps no heartbeat, so only its output counts.

    Args:
        progress: Reads the run's counter, see `post_training.report.heartbeat`. An earlier start may have left its
            first value, so only a change is life.
        clock: Seconds since any beginning.
    """

    def __init__(self, progress: Callable[[], int | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._clock = progress, clock
        self._seen, self._alive_at, self._read_at = progress(), clock(), clock()

    def output(self) -> None:
        """The training has printed something."""
        self._alive_at = self._clock()

    def seconds(self) -> float:
        """Since the last output or progress. The file is read once a second at most: it may lie on NFS."""
        now = self._clock()
        if now - self._read_at >= _HEARTBEAT_S:
            seen, self._read_at = self._progress(), now
            if seen is not None and seen != self._seen:
                self._seen, self._alive_at = seen, now
        return now - self._alive_at


class _Silent(Exception):
    """Nothing was printed and no rank made progress for so long that the training hangs as a whole."""


def _identity(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _new_log(folder: Path) -> Path:
    """A new, empty log. The supervisors of all nodes make theirs in one folder."""
    for number in count(1):
        with suppress(FileExistsError):
            log = folder / f"start_{number}.log"
            # Only its user reads what a training prints.
            os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            return log
    raise AssertionError  # numbers do not end
