"""Compare the heartbeats of all processes with the limits, and find those that stopped; uses no clock or network.

Limits apply to silence and to time without progress, never to the length of a phase. If one rank stops, all others soon
wait for it in a collective, and none of them makes progress. So a process that sends nothing is named before one that
reports that it waits; if all send, one that computes is named before those that wait; and only if all wait, each for
another, are all named. A waiting rank counts as progressing while any rank does: the others wait as long as the slowest
pipeline stage or writer of a checkpoint needs, and that is healthy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from post_training.hang_detection.settings import MISSED_SIGNS, EndSeconds, WarnSeconds, WatchSettings
from post_training.hang_detection.signs import TRAINER, WAITS, Sign

START = "start"


@dataclass
class Seen:
    """The state of a process.

    Attributes:
        heard_at: when its last heartbeat came, by the watcher's clock.
        moved_at: when it last made progress, by the watcher's clock.
        sign: its last heartbeat; None before the first.
    """

    heard_at: float
    moved_at: float
    sign: Sign | None = None

    @property
    def phase(self) -> str | None:
        """The phase of its last heartbeat; `start` before the first."""
        return START if self.sign is None else self.sign.phase


@dataclass(frozen=True)
class Stop:
    """A process that has stopped.

    Attributes:
        phase: the phase of its last heartbeat.
        seconds: since its last heartbeat if it is silent, otherwise since its last progress.
        silent: whether it sends nothing; otherwise it sends heartbeats but makes no progress.
        beyond_end: whether the second limit is passed too.
        step: of the training loop.
        waiting: the ranks that wait for it.
        sign: its last heartbeat.
    """

    name: str
    phase: str | None
    seconds: float
    silent: bool
    beyond_end: bool
    step: int | None
    waiting: tuple[int, ...]
    sign: Sign | None

    @property
    def who(self) -> str:
        """`rank 3`, `the trainer`, or the name of another process."""
        return "the trainer" if self.name == TRAINER else f"rank {self.name}" if self.name.isdigit() else self.name

    def sentence(self) -> str:
        """Describe the stop for a person, as a clause."""
        if self.sign is None:
            return f"{self.who} has not started for {self.seconds:.0f} s"
        what = "has not answered" if self.silent else "has made no progress"
        phase = f"in {self.phase}" if self.phase else "between two phases"
        step = f" of step {self.step}" if self.step else ""
        waiting = f"; {in_words(self.waiting)} for it" if self.waiting else ""
        return (
            f"{self.who} (process {self.sign.pid} on {self.sign.host}) {what} for {self.seconds:.0f} s {phase}{step}, "
            f"last {self.sign.where}{waiting}"
        )


class Watch:
    """The processes of a run. Pass every heartbeat to `hear`, and call `stopped` from time to time.

    Args:
        settings: the limits.
        ranks: how many workers there will be.
        clock: returns seconds since an arbitrary moment.
    """

    def __init__(self, settings: WatchSettings, ranks: int, clock: Callable[[], float]):
        self._settings, self._ranks, self._clock = settings, ranks, clock
        self._seen = {TRAINER: Seen(clock(), clock())}
        self.progress = 0
        """Heartbeats so far that showed progress, of all processes together."""
        self.newest: Sign | None = None
        """The last heartbeat that showed progress."""

    def hear(self, sign: Sign) -> None:
        """Take in the newest heartbeat of a process; one that was taken in before changes nothing."""
        now = self._clock()
        if sign.name not in self._seen:
            self._seen[sign.name] = Seen(now, now)
        seen, last = self._seen[sign.name], self._seen[sign.name].sign
        if last is not None and (sign.pid, sign.serial) == (last.pid, last.serial):
            return
        if last is None or (sign.pid, sign.moves) != (last.pid, last.moves):
            self.progress, self.newest = self.progress + 1, sign
            seen.moved_at = now
        elif sign.phase != last.phase:  # the training loop begins or ends to wait for its workers, and does no work
            seen.moved_at = now
        seen.heard_at, seen.sign = now, sign
        if sign.name == TRAINER:  # it asks for its workers next
            for rank in range(self._ranks):
                self._seen.setdefault(str(rank), Seen(now, now))

    @property
    def step(self) -> int | None:
        """The current step of the training loop."""
        trainer = self._seen[TRAINER].sign
        return trainer.step if trainer else None

    def stopped(self) -> list[Stop]:
        """Return the processes to blame if any is beyond its first limit, by rank; empty if none is."""
        over = {name for name, seen in self._seen.items() if self._is_beyond(seen, self._settings.warn_s)}
        if not over:
            return []
        # A silent process that stopped between two phases is not beyond a limit of its own yet.
        silent = {name for name, seen in self._seen.items() if self._is_silent(seen) and (seen.sign or name in over)}
        computing = {name for name in over if not _waits(self._seen[name])}
        blamed = silent or computing or over
        ranks = [name for name in self._seen.keys() - blamed if name.isdigit()]
        waiting = tuple(sorted(int(name) for name in ranks if _waits(self._seen[name])))
        beyond_end = any(self._is_beyond(seen, self._settings.end_s) for seen in self._seen.values())
        return [self._stop(name, waiting, beyond_end) for name in sorted(blamed, key=_order)]

    def _stop(self, name: str, waiting: tuple[int, ...], beyond_end: bool) -> Stop:
        seen = self._seen[name]
        silent = self._is_silent(seen)
        seconds = self._clock() - (seen.heard_at if silent else seen.moved_at)
        return Stop(name, seen.phase, seconds, silent, beyond_end, self.step, waiting, seen.sign)

    def _is_silent(self, seen: Seen) -> bool:
        return seen.sign is None or self._clock() - seen.heard_at > MISSED_SIGNS * self._settings.interval_s

    def _is_beyond(self, seen: Seen, limits: WarnSeconds | EndSeconds) -> bool:
        now = self._clock()
        if seen.sign is None:
            return now - seen.heard_at > limits.start
        if now - seen.heard_at > limits.silent:
            return True
        limit = getattr(limits, seen.phase, None) if seen.phase else None
        return limit is not None and now - self._moved_at(seen) > limit

    def _moved_at(self, seen: Seen) -> float:
        """Return when a process last made progress; for a waiting one, when any that it may wait for did."""
        if not _waits(seen):
            return seen.moved_at
        return max(each.moved_at for name, each in self._seen.items() if each is seen or name != TRAINER)


def _waits(seen: Seen) -> bool:
    return seen.phase is not None and seen.sign is not None and seen.sign.where.startswith(WAITS)


def _order(name: str) -> tuple[bool, bool, int, str]:
    """Return a sort key: ranks by number, then other processes, then the trainer."""
    return (name == TRAINER, not name.isdigit(), int(name) if name.isdigit() else 0, name)


def in_words(numbers: Sequence[int]) -> str:
    """`rank 1 waits`, `ranks 0, 1 and 3 wait`."""
    ranks = [str(number) for number in numbers]
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    shown = ranks if len(ranks) <= 8 else [*ranks[:6], f"{len(ranks) - 6} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]} wait"
