"""What tests of the launchers need: the shipped file of a cluster with some values replaced, a port, a script."""

from __future__ import annotations

import importlib.util
import random
import re
import socket
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "scripts" / "env" / "a3_256_dies.env"
SHIPPED_2026 = SHIPPED.with_name("a3_256_dies_2026.env")


def free_port(address: str) -> int:
    """A port of `address` that nobody has, and that the system gives to no connection of another test meanwhile."""
    while True:
        # Below the range from which Linux takes ports, and above Ray's own for its workers.
        port = random.randrange(21_000, 32_000)
        try:
            with socket.create_server((address, port)):
                return port
        except OSError:
            continue


def write_cluster_file(path: Path, shipped: Path = SHIPPED, **values: object) -> Path:
    """Write a shipped file to `path` with `values`; names that it does not hold are added at its end."""
    text = shipped.read_text()
    for name, value in values.items():
        line = f"{name}={value}"
        text, replaced = re.subn(rf"^{name}=[^#\n]*", lambda _, line=line: f"{line} ", text, flags=re.MULTILINE)
        text += "" if replaced else f"{line}\n"
    path.write_text(text)
    return path


def lines_of_a_first_step() -> list[re.Pattern]:
    """The lines of a first step in docs/cluster.md, each as a pattern: its words, in their order, in one line."""
    section = (ROOT / "docs" / "cluster.md").read_text().partition("## 6.")[2].partition("## ")[0]
    lines = re.findall(r"^    (?!python )(.+)$", section, re.MULTILINE)  # without the command that follows them
    return [re.compile(".*".join(map(re.escape, re.findall(r"[A-Za-z_/]{3,}", line)))) for line in lines]


def load_script(path: str) -> ModuleType:
    """The module of a script, which lies in no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
