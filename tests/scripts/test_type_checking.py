"""The type checker of scripts/test.sh notices wrong types, and no line is excluded without a reason."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from overlay.pins import Pins

ROOT = Path(__file__).resolve().parents[2]
CHECKED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
IGNORED = re.compile(r"#\s*type:\s*ignore(?P<codes>\[[a-z, -]+\])?(?P<rest>.*)")


def without_reason(source: str) -> list[str]:
    """Return the lines that silence the type checker without an error code, or without a reason there or above."""
    lines = ["", *source.splitlines()]
    found = []
    for above, line in zip(lines, lines[1:], strict=False):
        match = IGNORED.search(line)
        if match and not (match["codes"] and ("#" in match["rest"] or above.lstrip().startswith("#"))):
            found.append(line.strip())
    return found


def check(*files: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", cache, *files]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=600)


def test_nothing_is_ignored_without_its_code_and_a_reason():
    files = [file for folder in CHECKED for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 250
    assert {str(file): found for file in files if (found := without_reason(file.read_text()))} == {}


def test_ignored_line_without_a_reason_detected():
    assert without_reason("x = 1  # type: ignore") and without_reason("x = 1  # type: ignore[misc]")
    assert not without_reason("x = 1  # type: ignore[misc]  # upstream's own")
    assert not without_reason("# Upstream's own.\nx = 1  # type: ignore[misc]")


def test_no_patch_package_is_left_out():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["disallow_untyped_defs"] is True and {*Pins.read().patch_packages()} & {*os.listdir(ROOT)} <= {
        *CHECKED
    }
    assert not any("disallow_untyped_defs" in override for override in settings["overrides"])


def test_wrong_type_detected_in_code_and_patch_body(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def pages(count: int) -> int:\n    return str(count)\n\n\ndef body(upstream):\n    pages('3')\n")
    ended = check(wrong, cache=tmp_path / "cache")
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.count("error:") == 3
    assert all(f"[{code}]" in ended.stdout for code in ("return-value", "arg-type", "no-untyped-def"))
    wrong.write_text("def pages(count: int) -> int:\n    return count\n")
    assert check(wrong, cache=tmp_path / "cache").returncode == 0
