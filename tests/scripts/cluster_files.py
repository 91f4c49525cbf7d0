"""Helpers for tests of the launchers: a shipped cluster file with replaced values, a script's module."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "scripts" / "env" / "a3_256_dies.env"
SHIPPED_2026 = SHIPPED.with_name("a3_256_dies_2026.env")


def write_cluster_file(path: Path, shipped: Path = SHIPPED, **values: object) -> Path:
    """Write a shipped file to `path` with `values`; names that it does not have are added at its end."""
    text = shipped.read_text()
    for name, value in values.items():
        line = f"{name}={value}"
        text, replaced = re.subn(rf"^{name}=[^#\n]*", lambda _, line=line: f"{line} ", text, flags=re.MULTILINE)
        text += "" if replaced else f"{line}\n"
    path.write_text(text)
    return path


def lines_of_a_first_step() -> list[re.Pattern]:
    """Return the lines of a first step in docs/cluster.md, each as a pattern of its words, in order, on one line."""
    section = (ROOT / "docs" / "cluster.md").read_text().partition("## 6.")[2].partition("## ")[0]
    lines = re.findall(r"^    (?!python )(.+)$", section, re.MULTILINE)  # without the command that follows
    return [re.compile(".*".join(map(re.escape, re.findall(r"[A-Za-z_/]{3,}", line)))) for line in lines]


def load_script(path: str) -> ModuleType:
    """Load a script, which is not part of a package, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
