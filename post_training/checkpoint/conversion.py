"""Runs a conversion: checks first, then writes files durably and in parallel, and the completion marker last."""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from post_training.checkpoint.durable import PARTIAL_SUFFIX, Written, hash_file, sync_folder, write_durably
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.manifest import MANIFEST_NAME, Manifest, check_digests
from post_training.checkpoint.outputs import OutputFile, TextFile
from post_training.checkpoint.source import Source
from post_training.checkpoint.workers import run_tasks

WORKER_BYTES = 768 << 20
"""Memory of a worker besides its largest buffers: interpreter, torch and layout."""

_LOCK_WAIT_S = 10
_GIB = 1 << 30


@dataclass(frozen=True)
class Conversion:
    """A planned conversion.

    Attributes:
        source_folder, source_files: the input files, which are hashed and compared with the folder's own manifest.
        source: the tensors in these files.
        output: folder to write.
        arguments: everything that determines the output, for the manifest.
        files: the files to write, in any order.
        marker: written last; with it the output counts as complete.
        checksums: SHA-256 of source files by name, if they are known from elsewhere.
    """

    source_folder: Path
    source_files: list[Path]
    source: Source
    output: Path
    arguments: dict[str, Any]
    files: list[OutputFile]
    marker: TextFile
    checksums: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """Result of a conversion.

    Attributes:
        written, written_bytes: number and bytes of the files that were written.
        kept, kept_bytes: number and bytes of the files that were complete from an earlier run.
        damaged: names of files of an earlier run that were damaged and written again.
    """

    written: int
    written_bytes: int
    kept: int
    kept_bytes: int
    damaged: tuple[str, ...]


def run(conversion: Conversion, workers: int, say: Callable[[str], None]) -> Summary:
    """Write the missing files. An interrupted conversion continues where it stopped.

    Args:
        conversion: the plan.
        workers: number of processes.
        say: called with messages for the user.

    Raises:
        CheckpointError: the source is damaged or has changed, the output folder belongs to something else, or there is
            not enough disk space or memory. The message has a remedy; finished files are kept.
    """
    conversion.output.mkdir(parents=True, exist_ok=True)
    with _locked(conversion.output), _explained(conversion.output):
        manifest = _resumed(conversion)
        _remove_partial_files(conversion.output)
        sources = _hash_sources(conversion, manifest, workers)
        manifest.sources = sources
        kept, damaged = _verified(conversion, manifest, workers)
        for name in damaged:
            say(f"{conversion.output / name}: damaged since it was written; writing it again")
        missing = [file for file in conversion.files if file.path not in kept]
        _check_space(conversion, missing, workers, say)
        if not missing and manifest.complete and _marked(conversion):
            return _summary({}, kept, damaged)
        (conversion.output / conversion.marker.path).unlink(missing_ok=True)
        manifest.complete, manifest.files = False, dict(kept)
        manifest.write(conversion.output)
        written = _write(conversion, missing, manifest, workers)
        _finish(conversion, manifest)
    return _summary(written, kept, damaged)


def _summary(written: dict[str, int], kept: dict[str, Written], damaged: tuple[str, ...]) -> Summary:
    kept_bytes = sum(file.bytes for file in kept.values())
    return Summary(len(written), sum(written.values()), len(kept), kept_bytes, damaged)


def _marked(conversion: Conversion) -> bool:
    path = conversion.output / conversion.marker.path
    return path.is_file() and path.read_text() == conversion.marker.text


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder. Workers inherit the lock: a rerun cannot begin while a killed run's worker still writes."""
    descriptor = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + _LOCK_WAIT_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CheckpointError(f"{folder}: another conversion is writing to this folder") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the errors of a full disk into a CheckpointError with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise CheckpointError(
            f"{path}: {os.strerror(error.errno)}. Free space and run the same command again; finished files are kept"
        ) from error


def _resumed(conversion: Conversion) -> Manifest:
    """Return the manifest to continue, or a new one. Raises CheckpointError if the folder holds anything else."""
    output = conversion.output
    manifest = Manifest.read(output)
    if manifest is None:
        strangers = [path for path in output.iterdir() if not path.name.endswith(PARTIAL_SUFFIX)]
        if strangers:
            raise CheckpointError(
                f"{output}: not empty ({strangers[0].name} is there) and has no {MANIFEST_NAME}. Choose another "
                "folder, or empty this one"
            )
        return Manifest(conversion.arguments)
    if manifest.arguments != conversion.arguments:
        key, other, own = different_entry(manifest.arguments, conversion.arguments)
        raise CheckpointError(
            f"{output}: contains a conversion with {key}={other!r}, but this one has {own!r}. Choose another folder, "
            "or empty this one"
        )
    return manifest


def different_entry(left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """Return the first key, with dots, at which two different JSON objects differ, and both values; None if absent."""
    keys = sorted(left.keys() | right.keys())
    key = next(key for key in keys if (key in left, left.get(key)) != (key in right, right.get(key)))
    one, other = left.get(key), right.get(key)
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return key, one, other
    inner, one, other = different_entry(one, other)
    return f"{key}.{inner}", one, other


def _remove_partial_files(folder: Path) -> None:
    for path in folder.rglob(f".*{PARTIAL_SUFFIX}"):
        path.unlink()


def progress_bar(total: int, what: str) -> tqdm:
    """Return a progress bar on standard error with bytes done, rate and time left."""
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, mininterval=1, leave=True)


def _hash_files(folder: Path, files: list[Path], workers: int, what: str) -> dict[str, Written]:
    """Return size and SHA-256 of files by their name relative to the folder."""
    digests = {}
    with progress_bar(sum(file.stat().st_size for file in files), what) as bar:
        for file, digest in run_tasks(hash_file, files, workers, bar):
            digests[str(file.relative_to(folder))] = digest
    return digests


def _hash_sources(conversion: Conversion, manifest: Manifest, workers: int) -> dict[str, Written]:
    """Hash the source, and compare it with its own manifest, known checksums and an earlier run of the conversion."""
    folder = conversion.source_folder
    origin = Manifest.read(folder)
    if origin is not None and not origin.complete:
        raise CheckpointError(f"{folder}: its own conversion has not finished. Run that one again first")
    found = _hash_files(folder, conversion.source_files, workers, "reading and hashing the source")
    if origin is not None:
        check_digests(folder, origin.files, found, str(folder / MANIFEST_NAME))
    for name, expected in conversion.checksums.items():
        if name in found and found[name].sha256 != expected:
            raise CheckpointError(
                f"{folder / name}: has SHA-256 {found[name].sha256}, not {expected}. Download it again"
            )
    if manifest.sources:
        where = f"{conversion.output / MANIFEST_NAME}, written when this conversion began,"
        check_digests(folder, manifest.sources, found, where)
        if manifest.sources.keys() != found.keys():
            raise CheckpointError(f"{folder}: its files have changed since this conversion began. Choose a new output")
    return found


def _verified(conversion: Conversion, manifest: Manifest, workers: int) -> tuple[dict[str, Written], tuple[str, ...]]:
    """Return the files of an earlier run that still have their SHA-256, and the names of those that do not."""
    planned = {file.path for file in conversion.files}
    paths = [conversion.output / name for name in manifest.files if name in planned]
    present = [path for path in paths if path.is_file()]
    if not present:
        return {}, ()
    found = _hash_files(conversion.output, present, workers, "verifying finished files")
    kept = {name: written for name, written in found.items() if manifest.files[name] == written}
    return kept, tuple(sorted(found.keys() - kept.keys()))


def _check_space(conversion: Conversion, missing: list[OutputFile], workers: int, say: Callable[[str], None]) -> None:
    """Raise CheckpointError if there is not enough disk space or memory for the files to write."""
    needed = sum(file.space for file in missing) + conversion.marker.space
    disk = os.statvfs(conversion.output)
    free = disk.f_bavail * disk.f_frsize
    busy = min(workers, max(len(missing), 1))
    memory = busy * (WORKER_BYTES + 2 * max((file.buffer for file in missing), default=0))
    available = _available_memory()
    say(
        f"{len(missing)} of {len(conversion.files)} files to write: {needed / _GIB:.2f} GiB on disk "
        f"({free / _GIB:.2f} GiB free), up to {memory / _GIB:.2f} GiB of memory in {busy} processes "
        f"({available / _GIB:.2f} GiB available)"
    )
    if needed > free:
        raise CheckpointError(
            f"{conversion.output}: needs {needed / _GIB:.2f} GiB more, but its disk has {free / _GIB:.2f} GiB free"
        )
    if memory > available:
        raise CheckpointError(
            f"{busy} workers may need {memory / _GIB:.2f} GiB of memory, but {available / _GIB:.2f} GiB are available. "
            "Use fewer --workers"
        )


def _available_memory() -> int:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _write(conversion: Conversion, missing: list[OutputFile], manifest: Manifest, workers: int) -> dict[str, int]:
    """Write files, the largest first; each is added to the manifest when it is durable."""
    ordered = sorted(missing, key=lambda file: -file.space)
    sizes: dict[str, int] = {}

    def write_file(index: int, progress: Callable[[int], None]) -> Written:
        file = ordered[index]
        with _explained(conversion.output / file.path):
            return write_durably(conversion.output / file.path, file.stream(conversion.source), file.space, progress)

    with progress_bar(sum(file.space for file in ordered), "writing") as bar:
        for index, written in run_tasks(write_file, range(len(ordered)), workers, bar):
            manifest.files[ordered[index].path] = written
            manifest.write(conversion.output)
            sizes[ordered[index].path] = written.bytes
    return sizes


def _finish(conversion: Conversion, manifest: Manifest) -> None:
    """Complete the manifest, then write the marker: a reader that sees the marker can verify all files."""
    marker = conversion.marker
    manifest.complete = True
    manifest.write(conversion.output)
    write_durably(conversion.output / marker.path, marker.stream(conversion.source), marker.space, lambda _: None)
    sync_folder(conversion.output)
