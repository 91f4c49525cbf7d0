"""The worked example of CONTRIBUTING.md, followed to the letter in a copy of the checkout."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "CONTRIBUTING.md"
STEP = re.compile(r"(?:(Make|Append to)\s+`(?P<file>[\w./]+)`:\n\n)?^```(python|bash)\n(?P<text>.*?)^```$", re.M | re.S)
LOCK, TABLE = "overlay/fingerprints.lock.json", "docs/patches.md"


def steps(guide: str) -> Iterator[tuple[str, str, str]]:
    """What to do in order: (Make or Append to, file, text), or ("", "", command)."""
    for match in STEP.finditer(guide):
        if match["file"]:
            yield match[1], match["file"], match["text"]
        else:
            yield from (("", "", command) for command in match["text"].splitlines())


def copied(folder: Path) -> Path:
    """The files of the checkout as they are now, and its environment."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def follow(guide: str, checkout: Path) -> list[str]:
    """Do what the guide says. Returns what its commands print; raises CalledProcessError for one that fails."""
    printed = []
    for verb, file, text in steps(guide):
        place = checkout / file
        if verb == "Make":
            assert not place.exists(), f"{file} is there already"
            place.write_text(text)
        elif verb:
            place.write_text(f"{place.read_text()}\n\n{text}")
        else:
            run = ["env", "-u", "PYTHONPATH", "bash", "-euc", text]
            printed.append(subprocess.run(run, cwd=checkout, capture_output=True, text=True, check=True).stdout)
    return printed


@pytest.mark.slow
def test_the_example_leads_to_a_patch_that_is_held_by_tests(tmp_path):
    checkout = copied(tmp_path)
    before = {name: (checkout / name).read_text() for name in (LOCK, TABLE)}
    locked, _, explained, tested = follow(GUIDE.read_text(), checkout)
    assert "wrote fingerprints.lock.json" in locked and "declared in: verl_patches.utils.py_functional" in explained
    assert re.search(r"^[5-9] passed", tested, re.M), tested
    for name, text in before.items():
        assert "append_to_dict" not in text and "append_to_dict" in (checkout / name).read_text()
    for tool in ("ruff check", "ruff format --check"):
        subprocess.run([f".venv/bin/{tool.split()[0]}", *tool.split()[1:], "."], cwd=checkout, check=True)


@pytest.mark.slow
def test_a_guide_whose_patch_does_nothing_fails(tmp_path):
    guide = GUIDE.read_text()
    nothing = re.sub(r"return upstream\(data, \{.*\}\)", "return upstream(data, new_data)", guide)
    assert nothing != guide
    with pytest.raises(subprocess.CalledProcessError) as raised:
        follow(nothing, copied(tmp_path))
    assert "test_on_changes_behaviour" in raised.value.stdout


def test_everything_that_the_guide_names_exists():
    text = GUIDE.read_text()
    made = {file for verb, file, _ in steps(text) if verb == "Make"}
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]
    files = set(re.findall(r"`([\w.-]+(?:/[\w.-]+)+)`", text)) - made
    missing = [name for name in {*links, *files} if "NAME" not in name and not (ROOT / name).exists()]
    assert missing == []
