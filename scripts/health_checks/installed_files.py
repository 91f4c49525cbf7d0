#!/usr/bin/env python3
"""Compare installed files with the hashes in their packages (RECORD of each
.dist-info).

A file whose size, modification time and inode have not changed since the last
check is not hashed again.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_NOT_COMPARED = {
    # The published wheel's own RECORD has a wrong hash of this file.
    "torch_npu-2.5.1.post1.dist-info/METADATA",
    # Behind a company's proxy its certificate authority is appended to these.
    "certifi/cacert.pem",
}
# A hint is printed before this many bytes are hashed.
WORTH_A_WORD = 200 * 10**6


@dataclass(frozen=True)
class Damage:
    """A file that differs from its package. `what` is `is missing` or `has been changed`."""

    package: str
    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file} of {self.package} {self.what}"


@dataclass(frozen=True)
class CheckedFiles:
    """The result of a check.

    Attributes:
        packages, files: how many were checked.
        hashed: bytes that had to be hashed.
        damages: the damaged files.
    """

    packages: int
    files: int
    hashed: int
    damages: tuple[Damage, ...]


def check_files(site: Path, packages: Iterable[str] = (), cache: Path | None = None) -> CheckedFiles:
    """Check the installed packages of the folder `site` (site-packages), or those named.

    Files outside `site` are left out: commands in bin/ contain the path of their environment. So are files without a
    hash in RECORD, which are made after the installation. `cache` stores the files that were found intact.

    Raises:
        ValueError: a package of `packages` is not installed there.
    """
    known = _read(cache)
    found = sorted(entry.name for entry in os.scandir(site) if entry.name.endswith(".dist-info"))
    wanted = {name.lower().replace("-", "_") for name in packages}
    chosen = [name for name in found if not wanted or name.partition("-")[0].lower() in wanted]
    absent = wanted - {name.partition("-")[0].lower() for name in chosen}
    if absent:
        raise ValueError(f"{', '.join(sorted(absent))} is not installed in {site}")
    # By package: the identity of its RECORD, and for each file its hash and the identity that had that hash.
    entries = {name: _entry(site, name, known.get(name)) for name in chosen}
    damages, stale = [], []
    for name, (_, files) in entries.items():
        for file, (digest, seen) in files.items():
            identity = _identity(site / file)
            if identity is None:
                damages.append(Damage(_label(name), file, "is missing"))
            elif identity != seen:
                stale.append((name, file, digest, identity))
    size = sum(identity[0] for *_, identity in stale)
    if size > WORTH_A_WORD:
        print(f"Checking {len(stale)} installed files ({size / 1e9:.1f} GB) by hash", file=sys.stderr)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = pool.map(lambda row: _digest(site / row[1], row[2].partition("=")[0]), stale)
        for (name, file, digest, identity), now in zip(stale, digests, strict=True):
            if now == digest:
                entries[name][1][file] = (digest, identity)
            else:
                damages.append(Damage(_label(name), file, "has been changed"))
    if cache is not None and (stale or entries.keys() - known.keys()):
        # Nothing can be stored in the environment of another user, which is then checked each time.
        with suppress(PermissionError):
            _write(cache, known | entries if wanted else entries)
    return CheckedFiles(len(chosen), sum(len(files) for _, files in entries.values()), size, tuple(damages))


def _label(folder: str) -> str:
    """Return `verl 0.4.0` for `verl-0.4.0.dist-info`."""
    return folder.removesuffix(".dist-info").replace("-", " ", 1)


def _identity(path: Path) -> list[int] | None:
    """Return size, modification time and inode of a file; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _entry(site: Path, name: str, known: list | None) -> list:
    """Return the identity of RECORD, and the files with hashes in it; what is `known` if RECORD is unchanged."""
    identity = _identity(site / name / "RECORD")
    if identity is None:
        return [None, {f"{name}/RECORD": ("", [])}]
    if known is not None and known[0] == identity:  # an earlier version of this program may have stored more files
        return [identity, {file: seen for file, seen in known[1].items() if file not in _NOT_COMPARED}]
    return [identity, {file: (digest, None) for file, digest in _records(site / name / "RECORD")}]


def _records(path: Path) -> Iterator[tuple[str, str]]:
    """Yield files inside site-packages and their hashes, as `sha256=...` in URL-safe base 64 without padding."""
    with path.open(newline="", encoding="utf-8") as lines:
        for file, digest, *_ in csv.reader(lines):
            # Python compiles a .pyc again if its source is newer, even one from a package.
            inside = not file.startswith(("..", "/"))
            if digest and inside and not file.endswith(".pyc") and file not in _NOT_COMPARED:
                yield file, digest


def _digest(path: Path, method: str) -> str:
    try:
        with path.open("rb") as file:
            done = hashlib.file_digest(file, method).digest()
    except OSError:
        return ""
    return f"{method}={base64.urlsafe_b64encode(done).decode().rstrip('=')}"


def _read(cache: Path | None) -> dict[str, list]:
    """Read the files that an earlier check found intact; nothing if the cache is absent or truncated."""
    try:
        known = json.loads(cache.read_bytes()) if cache else {}
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(cache: Path, entries: dict[str, list]) -> None:
    cache.parent.mkdir(exist_ok=True)
    new = cache.with_name(f"{cache.name}.{os.getpid()}")
    new.write_text(json.dumps(entries))
    os.replace(new, cache)


def main(arguments: list[str] | None = None) -> int:
    """Check an environment; return 0 if it is intact, else 2 after printing a sentence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", type=Path, help="the folder of a virtual environment")
    root = parser.parse_args(arguments).environment
    site = root / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    checked = check_files(site, cache=root / "stamps" / "files.json")
    if not checked.damages:
        return 0
    more = f" and {len(checked.damages) - 1} more" if checked.damages[1:] else ""
    print(
        f"error: {checked.damages[0]}{more} ({site}): installed packages must not be edited, because the overlay "
        f"patches them at run time. Remove {root} and start again; if it comes back, empty the installer's cache (uv "
        "cache clean).",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
