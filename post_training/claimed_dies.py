"""The dies of this machine that a job takes, so that a second job is told before it fails on them.

A job holds an abstract socket for each of its dies. The kernel releases it however the job ends, it is no file that
could be deleted or belong to one user, and the next job can ask the kernel who holds it. Such names belong to a network
namespace, so jobs in containers with the host's network, as scripts/run_container.sh starts them, see each other's.

Dies are known by their device files, since CANN numbers those that a container has from 0.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from post_training.inherited_environment import VISIBLE

# Credentials of the process at the other end of a socket, as the kernel gives them: pid, uid and gid.
_CREDENTIALS = struct.Struct("3i")


class DiesInUse(RuntimeError):
    """Another job on this machine holds a die that this job needs; the message is one sentence."""


def devices_of_dies(root: Path = Path("/")) -> list[Path]:
    """Return the device files of this machine's or container's dies, in the order in which CANN numbers them."""
    found = {path: re.fullmatch(r"davinci(\d+)", path.name) for path in (root / "dev").glob("davinci*")}
    return sorted((path for path, match in found.items() if match), key=lambda path: int(path.name[len("davinci") :]))


@contextmanager
def claimed_dies(
    count: int, environment: Mapping[str, str] | None = None, root: Path = Path("/")
) -> Iterator[Sequence[int]]:
    """Hold the dies of a job on this machine while the block lasts; yields their numbers. Emulated dies have no files.

    Args:
        count: dies of the job.
        environment: where CANN's list of visible NPUs may be; without it the job takes the first dies.
        root: the top of the file system.

    Raises:
        DiesInUse: another job holds one of them.
    """
    environment = os.environ if environment is None else environment
    devices, visible = devices_of_dies(root), environment.get(VISIBLE)
    entries = [entry.strip() for entry in visible.split(",")] if visible else list(map(str, range(count)))
    # An invalid list is rejected elsewhere.
    wanted = [int(entry) for entry in entries[:count] if entry.isdecimal() and int(entry) < len(devices)]
    with ExitStack() as held:
        for die in wanted:
            claim = held.enter_context(socket.socket(socket.AF_UNIX))
            try:
                claim.bind(_name(devices[die]))
            except OSError:
                raise DiesInUse(_sentence(die, wanted, visible, devices)) from None
            claim.listen()
        yield wanted


def _name(device: Path) -> str:
    """Return the abstract socket name of a die; the kernel allows at most 107 bytes."""
    return f"\0post-training-die-{hashlib.sha256(os.fsencode(device)).hexdigest()}"


def _holder(device: Path) -> str | None:
    """Return who holds a die, in words; None if nobody does."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(_name(device))
        except BlockingIOError:  # its queue of connections is full
            return "another job"
        except OSError:
            return None
        process, user, _ = _CREDENTIALS.unpack(
            probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = f"user {user}"
    # A process of another container has pid 0 here.
    return f"process {process} of {name}" if process else f"a process of {name} in another container"


def _sentence(die: int, wanted: Sequence[int], visible: str | None, devices: Sequence[Path]) -> str:
    holders = [_holder(device) for device in devices]
    free = [
        str(number) for number, holder in enumerate(holders) if holder is None or number in wanted[: wanted.index(die)]
    ]
    key = f"{VISIBLE}={visible}" if visible else f"{VISIBLE} (not set: dies 0 to {len(wanted) - 1})"
    remedy = "Wait until that job has ended"
    if len(free) >= len(wanted):
        remedy = f"Set it to {','.join(free[: len(wanted)])}, which are free, or wait until that job has ended"
    return f"{key} is invalid: {holders[die] or 'another job'} has die {die} ({devices[die]}). {remedy}."
