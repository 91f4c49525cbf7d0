"""One start of a supervised run: its log, its status, the files it wrote, and how long it may be silent."""

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
"""Files of the run that go into the archive about a failure."""
_HEARTBEAT_S = 1.0
_END_OF_LOG_BYTES = 400_000


@dataclass(frozen=True)
class Start:
    """One start, and the files that it found in the run's folder, which distinguish its own from earlier starts' files.

    Attributes:
        log: The file with its output.
        time: Unix seconds when it began. Entries of records have a time too.
        files: Inode, size and modification time of each file that a start replaces as a whole. The file system's clock
            may be a server's, so these are only compared with each other.
    """

    log: Path
    time: float
    files: Mapping[str, tuple[int, int, int]]

    @classmethod
    def begin(cls, folder: Path) -> Start:
        """Return a start that begins now, with a log of its own in the run's folder."""
        files = {name: found for name in KEPT if (found := _identity(folder / name))}
        return cls(_new_log(folder), time.time(), files)

    @property
    def status_file(self) -> Path:
        """The file in which the launcher and the training keep their status."""
        return self.log.with_suffix(".status.json")

    @property
    def status(self) -> StartStatus:
        """The last status that the launcher or the training reported."""
        return StartStatus.read(self.status_file)

    @property
    def is_worker(self) -> bool:
        """Whether this node gives its dies to another node's training."""
        return self.status.role == "worker"

    def wrote(self, file: Path) -> bool:
        """Return whether this start has written the file."""
        found = _identity(file)
        return found is not None and found != self.files.get(file.name)

    def end_of_log(self) -> str:
        """Return the last 400,000 bytes of its output."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _END_OF_LOG_BYTES))
            return file.read().decode("utf-8", errors="replace")

    def end(self, code: int) -> dict[str, int]:
        """Return the record's fact about the end: `left` for this node's part, `ended` for the whole training."""
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
            signals: End the run, as in `run_to_the_end`.
            silence: Measures how long the training has shown no life.
            silent_after: Seconds of silence that end the run.
            check: Called while the command runs. An exception from it ends the run, and is raised here.

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
    """Measures how long a training has shown no life: neither output nor progress of a rank.

    A training whose hang detector is off writes no heartbeat, so only its output counts.

    Args:
        progress: Reads the run's counter, see `post_training.report.heartbeat`. Its first value may be that of an
            earlier start, so only a change counts as life.
        clock: Returns seconds since an arbitrary moment.
    """

    def __init__(self, progress: Callable[[], int | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._clock = progress, clock
        self._seen, self._alive_at, self._read_at = progress(), clock(), clock()

    def output(self) -> None:
        """Note that the training has printed something."""
        self._alive_at = self._clock()

    def seconds(self) -> float:
        """Return the seconds since the last output or progress. Reads the file, maybe on NFS, once a second at most."""
        now = self._clock()
        if now - self._read_at >= _HEARTBEAT_S:
            seen, self._read_at = self._progress(), now
            if seen is not None and seen != self._seen:
                self._seen, self._alive_at = seen, now
        return now - self._alive_at


class _Silent(Exception):
    """Nothing was printed and no rank made progress for so long that the whole training counts as hung."""


def _identity(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _new_log(folder: Path) -> Path:
    """Create a new, empty log. The supervisors of all nodes create theirs in one folder."""
    for number in count(1):
        with suppress(FileExistsError):
            log = folder / f"start_{number}.log"
            # Only the user may read the output of a training.
            os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            return log
    raise AssertionError  # numbers do not end
