"""An archive of text files that can be shared: secrets are masked, and only its owner can read it."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from post_training.masking.streams import copy_masked_file
from post_training.masking.values import Secrets


def write_archive(path: Path, folder: str, files: Mapping[str, Path]) -> None:
    """Write a tar.gz with masked copies of text files, by their names inside its top folder `folder`; mode 0600.

    Raises:
        OSError: it cannot be written.
    """
    secrets = Secrets()
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as made, tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, file in files.items():
            with file.open("rb") as source, tempfile.TemporaryFile(dir=path.parent) as copy:
                copy_masked_file(source, secrets, copy.write)
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mtime, entry.mode = copy.tell(), int(file.stat().st_mtime), 0o600
                copy.seek(0)
                archive.addfile(entry, copy)
