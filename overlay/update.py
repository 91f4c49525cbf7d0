"""Run the project's own generators, which pins.toml lists, after those of the engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from overlay.pins import Generator


def generate(generators: tuple[Generator, ...], folder: Path) -> Iterator[tuple[bool, str]]:
    """Run each generator in a process of its own, in order.

    A generator that fails leaves the file as it is, and the others run.

    Args:
        generators: modules that print a file, or write their files themselves.
        folder: of the pins file; the files' paths are relative to it.

    Yields:
        Whether the generator succeeded, and a line that says what it wrote or why it wrote nothing.
    """
    for generator in generators:
        command = [sys.executable, "-m", generator.module]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it printed no reason"])[-1]
            yield False, f"python -m {generator.module} failed with exit code {done.returncode}: {reason}"
        elif generator.file:
            file = (folder / generator.file).resolve()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(done.stdout, encoding="utf-8")
            yield True, f"wrote {file}"
        else:
            yield True, f"ran {generator.module}"
