"""The files that a process has mapped."""

from pathlib import Path


def mapped_files() -> list[str]:
    """Return the paths in ``/proc/self/maps``, which may hold spaces, and the kernel's names, such as ``[heap]``."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return sorted({fields[5] for fields in lines if len(fields) == 6})
