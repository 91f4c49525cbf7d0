"""Reads lists of SHA-256 checksums in the format of sha256sum."""

from pathlib import Path

from post_training.checkpoint.files import CheckpointError
from post_training.user_files import FileError, read_text


def read_checksums(path: Path) -> dict[str, str]:
    """Map file names to their hexadecimal SHA-256. Raises CheckpointError for a line in another format."""
    digests = {}
    try:
        lines = read_text(path).splitlines()
    except FileError as error:
        raise CheckpointError(str(error)) from error
    for line in lines:
        digest, _, name = line.partition(" ")
        if len(digest) != 64 or not name.strip(" *"):
            raise CheckpointError(f"{path}: {line!r} is not a line of sha256sum")
        digests[name.strip(" *")] = digest.lower()
    return digests
