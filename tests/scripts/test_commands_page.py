"""docs/commands.md lists every script that a user starts, with an example that its own --help allows."""

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.scripts.cluster_files import ROOT

PAGES = [ROOT / "docs" / f"commands{language}.md" for language in ("", ".zh")]
# Programs for users that are not directly in scripts/.
ELSEWHERE = {
    "gsm8k.py": "examples/data_preprocess/gsm8k.py",
    "math_dataset.py": "examples/data_preprocess/math_dataset.py",
    "launch.sh": "scripts/internal/launch.sh",
}
# It has no --help of its own: its options are those of the launchers that call it.
LAUNCHER = "scripts/train_deepseekv3_256die_true_weight.sh"


def entries(page: Path) -> dict[str, tuple[str, str]]:
    """Return the text and the example of every script on a page."""
    found = {}
    for part in re.split(r"^### ", page.read_text(), flags=re.MULTILINE)[1:]:
        part = part.partition("\n## ")[0]
        name, _, rest = part.partition("\n")
        lines = re.findall(r"^    (.*)$", rest, re.MULTILINE)
        found[name] = (rest.strip().splitlines()[0], "\n".join(lines))
    return found


ENTRIES = entries(PAGES[0])


def help_of(script: str) -> str:
    """Return the output of `--help`."""
    path = ROOT / (LAUNCHER if script == ELSEWHERE["launch.sh"] else script)
    if path.suffix == ".sh":
        return subprocess.run(["bash", path, "--help"], capture_output=True, text=True, check=True).stdout
    printed = io.StringIO()
    # evaluate.py sets variables for its imports.
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "argv", [str(path), "--help"]),
        mock.patch.object(sys, "path", list(sys.path)),
        contextlib.redirect_stdout(printed),
        pytest.raises(SystemExit),
    ):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def test_every_script_has_an_entry() -> None:
    scripts = {path.name for pattern in ("[!_]*.py", "*.sh") for path in (ROOT / "scripts").glob(pattern)}
    assert set(ENTRIES) == scripts | set(ELSEWHERE)


def test_both_languages_have_the_same_entries_and_examples() -> None:
    chinese = entries(PAGES[1])
    assert list(chinese) == list(ENTRIES)
    assert [example for _, example in chinese.values()] == [example for _, example in ENTRIES.values()]


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_example_has_known_options_only(name: str) -> None:
    purpose, example = ENTRIES[name]
    script = ELSEWHERE.get(name, f"scripts/{name}")
    assert len(purpose) > 20 and purpose[0] not in " #|"
    command = example.replace("\\\n", " ").splitlines()[-1]
    words = shlex.split(command)
    assert words[0] in ("bash", "python", "python3", ".venv/bin/python")
    assert words[1].removeprefix("./").removeprefix("verl_patches/") == script
    own = words[2 : words.index("--")] if "--" in words else words[2:]
    known = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", help_of(script)))
    assert [word for word in own if word.startswith("-") and word not in known] == []
