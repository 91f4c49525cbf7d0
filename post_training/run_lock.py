"""Exclusive ownership of a folder that a run writes, also if several machines share the file system.

An owner has a file `.ROLE.owner.N` in the folder, which says who it is and holds a counter that it raises every few
seconds. A new owner creates the file with the next number, which only one can: `link` is atomic on NFS as on a local
disk, whereas `flock` need not reach other machines. It may do so if the owner with the highest number has released the
folder, has ended, or has not raised its counter for `STALE_S` seconds by the clock of the observer: clocks of machines
are never compared. The kernel knows whether an owner on the same machine runs, so a killed one loses it at once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from post_training.arguments import absolute

BEAT_S = 10.0
STALE_S = 90.0
"""Seconds without a heartbeat after which another start takes the folder over."""

_LOOK_S = 2 * BEAT_S
_POLL_S = 1.0
IN_USE = "is in use by process"
_RELEASED, _WIDTH = b"released", 20


class FolderInUse(RuntimeError):
    """The folder belongs to a run that is still alive; the message is one sentence."""


@dataclass(frozen=True)
class _Seen:
    """An owner's file as it was read; every heartbeat changes `content`."""

    content: bytes

    @property
    def released(self) -> bool:
        return self.content.rstrip().endswith(_RELEASED)

    def facts(self) -> dict[str, str | int]:
        """Return who the owner is; empty if the file is still being written or is damaged."""
        try:
            found = json.loads(self.content.partition(b"\n")[0])
            return found if isinstance(found, dict) and isinstance(found["pid"], int) else {}
        except (ValueError, KeyError):
            return {}


class FolderLock:
    """The ownership of one folder in one role.

    Args:
        folder: created if it does not exist.
        role: kind of owner; owners of different roles, as a supervisor and its run, do not exclude each other.
        wait, clock: for tests.
    """

    def __init__(
        self,
        folder: Path,
        role: str,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self._role = folder, role
        self._wait, self._clock = wait, clock
        self._number = self._beats = 0
        self._descriptor = -1

    def acquire(self) -> None:
        """Become the owner.

        Raises:
            FolderInUse: another owner is alive.
            OSError: the folder cannot be created or written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            newest = self._newest()
            if newest:
                self._reject_living(newest, STALE_S)
            if not self._create(newest + 1):
                if self._newest() == newest:  # a client of NFS may list late what is there
                    self._wait(_POLL_S)
                continue
            if self._newest() > newest + 1:  # a stale listing of the folder had hidden a start in between
                os.close(self._descriptor)
                self._file(newest + 1).unlink(missing_ok=True)
                continue
            self._number = newest + 1
            # Keep the previous owner's file: a start that still sees it as the highest must not get this number.
            for number in self._numbers():
                if number < newest:
                    self._file(number).unlink(missing_ok=True)
            return

    def check_free(self) -> None:
        """Check that no owner is alive; one on another machine is given the time of two heartbeats to show itself.

        Raises:
            FolderInUse: an owner is alive.
        """
        newest = self._newest() if self.folder.is_dir() else 0
        if newest:
            self._reject_living(newest, _LOOK_S)

    def beat(self) -> bool:
        """Raise the counter; return False if another start has taken the folder over."""
        self._beats += 1
        self._write_state(b"%020d" % self._beats)
        return self._newest() == self._number

    def release(self) -> None:
        """Release the folder; the file stays and says so."""
        with suppress(OSError):  # the next owner finds that this process has ended
            self._write_state(_RELEASED.ljust(_WIDTH))
        os.close(self._descriptor)

    def _write_state(self, state: bytes) -> None:
        # Written in place: a start that has taken over has a file of its own, which this cannot touch.
        os.pwrite(self._descriptor, state, os.fstat(self._descriptor).st_size - _WIDTH - 1)
        os.fsync(self._descriptor)

    def _reject_living(self, number: int, seconds: float) -> None:
        """Raise FolderInUse unless the owner with this number has ended or sends no heartbeat for `seconds`."""
        first = self._read(number)
        if first is None or first.released:
            return
        facts = first.facts()
        if facts.get("machine") == _machine():
            if _process_start(int(facts["pid"])) == facts.get("started"):
                raise FolderInUse(self._sentence(facts))
            return
        until = self._clock() + seconds
        print(f"{self.folder} has an owner on another machine ({facts.get('host', 'unknown')}); waiting up to "
              f"{seconds:g} s for its heartbeat ...", flush=True)  # fmt: skip
        while self._clock() < until:
            self._wait(_POLL_S)
            now = self._read(number)
            if now is None or now.released:
                return
            if now.content != first.content:
                raise FolderInUse(self._sentence(now.facts() or facts))

    def _sentence(self, facts: dict[str, str | int]) -> str:
        return (
            f"{self.folder} {IN_USE} {facts.get('pid')} on {facts.get('host')}, since {facts.get('began')}. Wait for "
            "its end, stop it, or choose another folder"
        )

    def _create(self, number: int) -> bool:
        """Create the file with this number; return False if another start was faster."""
        facts = {
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "started": _process_start(os.getpid()),
            "machine": _machine(),
            "began": datetime.now().isoformat(sep=" ", timespec="seconds"),
        }
        content = json.dumps(facts).encode() + b"\n" + b"0" * _WIDTH + b"\n"
        unfinished = self.folder / f".{self._role}.owner.{uuid.uuid4().hex}.new"
        self._descriptor = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        try:
            os.write(self._descriptor, content)
            os.fsync(self._descriptor)
            self._publish(unfinished, self._file(number), content)
        except FileExistsError:
            os.close(self._descriptor)
            return False
        except OSError:
            os.close(self._descriptor)
            raise
        finally:
            unfinished.unlink(missing_ok=True)
        return True

    def _publish(self, unfinished: Path, file: Path, content: bytes) -> None:
        try:
            os.link(unfinished, file)
        except FileExistsError:
            raise
        except OSError:
            # No hard links on this file system: the name is as exclusive, but the content comes a moment later.
            other = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
            os.write(other, content)
            os.fsync(other)
            os.close(self._descriptor)
            self._descriptor = other

    def _read(self, number: int) -> _Seen | None:
        try:
            # Opened anew each time, so that an NFS client asks the server for the current content.
            return _Seen(self._file(number).read_bytes())
        except FileNotFoundError:
            return None

    def _newest(self) -> int:
        return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        name = re.compile(rf"\.{re.escape(self._role)}\.owner\.(\d+)")
        return [int(found[1]) for entry in os.listdir(self.folder) if (found := name.fullmatch(entry))]

    def _file(self, number: int) -> Path:
        return self.folder / f".{self._role}.owner.{number}"


class LivingOwners:
    """Finds the living owners of a folder whose roles have a common prefix, for an observer that looks now and then.

    An owner on another machine counts as alive from the first rise of its counter that was seen, until none was seen
    for `STALE_S` seconds. For one on this machine the kernel knows.

    Args:
        folder: shared by all machines.
        prefix: beginning of the roles.
        clock: for tests.
    """

    def __init__(self, folder: Path, prefix: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._name = re.compile(rf"\.({re.escape(prefix)}.*)\.owner\.(\d+)")
        self._seen: dict[str, tuple[bytes, float | None]] = {}

    def look(self) -> set[str]:
        """Return the roles whose owners are alive."""
        now, living = self._clock(), set()
        for role, content in self._newest():
            owner = _Seen(content)
            facts = owner.facts()
            if owner.released or not facts:
                self._seen.pop(role, None)
            elif facts.get("machine") == _machine():
                if _process_start(int(facts["pid"])) == facts.get("started"):
                    living.add(role)
            else:
                before, rose = self._seen.get(role, (content, None))
                rose = now if content != before else rose
                self._seen[role] = content, rose
                if rose is not None and now - rose <= STALE_S:
                    living.add(role)
        return living

    def _newest(self) -> Iterator[tuple[str, bytes]]:
        """Yield each role with the content of its owner file that has the highest number."""
        numbers: dict[str, int] = {}
        for entry in os.listdir(self._folder):
            if found := self._name.fullmatch(entry):
                numbers[found[1]] = max(numbers.get(found[1], 0), int(found[2]))
        for role, number in numbers.items():
            with suppress(OSError):  # released and deleted by the next owner meanwhile, or the server is away
                yield role, (self._folder / f".{role}.owner.{number}").read_bytes()


@dataclass
class Ownership:
    """The state of the folders that a block owns.

    Attributes:
        lost: Says which folder another start has taken over, as one sentence; empty while none has.
    """

    lost: str = ""


@contextmanager
def owning(folders: Sequence[Path], role: str) -> Iterator[Ownership]:
    """Own these folders in the block, while a thread raises their counters.

    If another start takes one over, because this process stood still for `STALE_S` seconds, the thread prints an error
    and sends SIGTERM to this process. Raises FolderInUse, OSError: see `FolderLock.acquire`.
    """
    owned, over = Ownership(), threading.Event()
    with ExitStack() as stack:
        locks = []
        for folder in sorted({absolute(folder) for folder in folders}):
            lock = FolderLock(folder, role)
            lock.acquire()
            stack.callback(lock.release)
            locks.append(lock)
        thread = threading.Thread(target=_beat, args=(locks, over, owned), name="folder-owner", daemon=True)
        thread.start()
        try:
            yield owned
        finally:
            over.set()
            thread.join(BEAT_S)


def _beat(locks: Sequence[FolderLock], over: threading.Event, owned: Ownership) -> None:
    while not over.wait(BEAT_S):
        for lock in locks:
            try:
                kept = lock.beat()
            except OSError as error:  # the server is away for a moment; else the run fails by itself
                print(f"warning: {lock.folder}: the heartbeat cannot be written ({error.strerror})", file=sys.stderr)
                continue
            if not kept:
                owned.lost = f"another start took over {lock.folder}, because this one stood still for {STALE_S:g} s"
                print(f"error: {owned.lost}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                return


def _machine() -> str:
    """Return the boot id of the kernel and the pid namespace of this process: within both, a pid is unique."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _process_start(process: int) -> str:
    """Return when a process began, in the kernel's clock ticks; empty if no process with that pid runs."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]
