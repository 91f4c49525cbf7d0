"""Running test commands as another user of this machine."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Only in the command's mount namespace, replace the closed folder by an empty one that contains just Python.
_OPEN = """
umask 022
exec {python}<"$1"
mount -t tmpfs -o mode=755 tmpfs "$2"
mkdir -p "$1"
mount --no-canonicalize --bind "/proc/self/fd/$python" "$1"
exec {python}<&-
shift 2
exec "$@"
"""


@dataclass(frozen=True)
class User:
    """A user and a home folder. `prefix` is prepended to a command to run it as this user."""

    name: str
    uid: int
    home: Path
    prefix: tuple[str, ...] = ()

    def start(self, *command: str, cwd: Path, log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command with only this user's environment; the process ID is that of the command itself."""
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        environment = {"HOME": str(self.home), "PATH": path, "PYTHONPATH": str(cwd), "COLUMNS": "80", **variables}
        with log.open("wb") as output:
            return subprocess.Popen(
                [*self.prefix, *command], cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a folder that every user can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="users-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def this_user(home: Path) -> User:
    """Return the user running the tests, with another home."""
    home.mkdir()
    return User(pwd.getpwuid(os.getuid()).pw_name, os.getuid(), home)


def second_user(home: Path) -> User:
    """Return the user `nobody`, or the tests' own user with another home if it cannot become another user.

    If Python is inside the closed home of the tests' user, the command sees it at the same path in a mount namespace of
    its own; everything else, including /tmp and /dev/shm, is the machine's.
    """
    nobody = pwd.getpwnam("nobody")
    become = ("setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups")
    prefix, closed = become, _closed_folder(Path(sys.base_prefix))
    if closed:
        prefix = ("unshare", "--mount", "bash", "-euc", _OPEN, "bash", sys.base_prefix, str(closed), *become)
    probe = [*prefix, sys.executable, "-c", "pass"]
    if os.getuid() != 0 or not shutil.which("setpriv") or subprocess.run(probe, capture_output=True).returncode:
        return this_user(home)
    home.mkdir()
    os.chown(home, nobody.pw_uid, nobody.pw_gid)
    return User("nobody", nobody.pw_uid, home, prefix)


def _closed_folder(path: Path) -> Path | None:
    """Return the first folder on the way to `path` that other users cannot enter."""
    return next((folder for folder in reversed([path, *path.parents]) if not folder.stat().st_mode & 0o001), None)
