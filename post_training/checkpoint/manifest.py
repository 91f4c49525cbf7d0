"""manifest.json of an output folder: the source files, the arguments, and the SHA-256 of every file written."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from post_training.checkpoint.durable import Written, write_durably
from post_training.checkpoint.files import CheckpointError
from post_training.user_files import read_object

MANIFEST_NAME = "manifest.json"
_FORMAT = 1
# Seconds within which an NFS client has to see the files that other nodes have written.
_SEEN_WITHIN_S, _POLL_S = 30.0, 0.5


@dataclass
class Manifest:
    """Content of manifest.json.

    Attributes:
        arguments: everything that determines the output, including the tool's name.
        sources, files: the files that were read and those that were written, by name relative to their folders.
        complete: whether every file is there.
    """

    arguments: dict[str, Any]
    sources: dict[str, Written] = field(default_factory=dict)
    files: dict[str, Written] = field(default_factory=dict)
    complete: bool = False

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """Read the folder's manifest; None if it has none. Raises CheckpointError if it is damaged."""
        path = folder / MANIFEST_NAME
        if not path.is_file():
            return None
        try:
            content = read_object(path)
            if content.pop("format") != _FORMAT:
                raise ValueError("unknown format")
            sources, files = (
                {name: Written(**entry) for name, entry in content.pop(part).items()} for part in ("sources", "files")
            )
            return cls(sources=sources, files=files, **content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path}: not a manifest of these tools ({error!r})") from error

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest durably.

        Raises:
            CheckpointError: the manifest is marked as complete, and a file is missing or of another size.
        """
        problem = describe_missing(folder, self.files) if self.complete else ""
        if problem:
            raise CheckpointError(problem)
        text = json.dumps({"format": _FORMAT} | asdict(self), indent=1).encode()
        write_durably(folder / MANIFEST_NAME, [text], len(text), lambda _: None)


def describe_missing(folder: Path, files: Mapping[str, Written]) -> str:
    """Return a sentence for the first of these files that is missing in the folder or has another size, else ""."""
    deadline = time.monotonic() + _SEEN_WITHIN_S
    for name, written in files.items():
        while (size := _size(folder / name)) != written.bytes:
            if time.monotonic() > deadline:
                found = "is missing" if size is None else f"has {size} bytes"
                return (
                    f"{folder / name}: {found} instead of the {written.bytes} bytes written. Stop whatever else writes "
                    "into this folder"
                )
            os.listdir(folder)  # makes an NFS client ask the server again
            time.sleep(_POLL_S)
    return ""


def _size(path: Path) -> int | None:
    try:
        with path.open("rb") as file:  # opening it avoids NFS's cached attributes
            return os.fstat(file.fileno()).st_size
    except OSError:
        return None


def check_digests(folder: Path, expected: dict[str, Written], found: dict[str, Written], origin: str) -> None:
    """Raise CheckpointError for the first file whose entries in `found` and `expected` differ."""
    for name in sorted(expected.keys() & found.keys()):
        if expected[name] != found[name]:
            raise CheckpointError(
                f"{folder / name}: has SHA-256 {found[name].sha256} ({found[name].bytes} bytes), but {origin} has "
                f"{expected[name].sha256} ({expected[name].bytes} bytes): the file has changed"
            )
