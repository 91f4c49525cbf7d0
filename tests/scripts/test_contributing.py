"""The worked examples in CONTRIBUTING.md, followed literally in a copy of the checkout."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "CONTRIBUTING.md"
STEP = re.compile(r"(?:(Make|Append to)\s+`(?P<file>[\w./]+)`:\n\n)?^```(python|bash)\n(?P<text>.*?)^```$", re.M | re.S)
LOCK, TABLE, KEYS = "overlay/fingerprints.lock.json", "docs/patches.md", "docs/configuration.md"
EFFECTS = "tests/demonstrations/effects.json"
GENERATED = {"patch": {LOCK, TABLE, EFFECTS}, "feature": {LOCK, TABLE, EFFECTS, KEYS}, "model": set[str]()}
"""Files that each example generates anew."""
MINUTES = "test_load_weights.py"
"""A word in the command that takes minutes, which only the exhaustive tier runs."""
TOUCHED = {"patch": 2, "feature": 3, "model": 2}
"""Number of files that each example creates or changes, besides generated ones."""


def example(guide: str, name: str) -> str:
    """Return the section of the guide that adds this."""
    return guide.partition(f"## Example: add a {name}\n")[2].partition("\n## ")[0]


def steps(guide: str) -> Iterator[tuple[str, str, str]]:
    """Yield the steps in order: (Make or Append to, file, text), or ("", "", command)."""
    for match in STEP.finditer(guide):
        if match["file"]:
            yield match[1], match["file"], match["text"]
        else:
            yield from (("", "", command) for command in match["text"].splitlines())


def copied(folder: Path) -> Path:
    """Copy the checkout's current files, and link its environment."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def append(file: Path, text: str) -> None:
    """Append code to a file, and sort the imports at its beginning into the file's own."""
    lines = text.splitlines()
    while lines and lines[0].startswith("from "):
        imported, content = lines.pop(0), file.read_text().splitlines()
        after = next(place for place, line in enumerate(content) if line.startswith("from ") and line > imported)
        file.write_text("\n".join([*content[:after], imported, *content[after:]]) + "\n")
    file.write_text(f"{file.read_text()}\n\n{chr(10).join(lines).strip()}\n")


def follow(guide: str, checkout: Path, minutes: bool = False) -> list[str]:
    """Follow the guide. Return what its commands print; raises CalledProcessError if one fails."""
    printed = []
    for verb, file, text in steps(guide):
        place = checkout / file
        if verb == "Make":
            assert not place.exists(), f"{file} is there already"
            place.parent.mkdir(exist_ok=True)
            place.write_text(text)
        elif verb:
            append(place, text)
        elif minutes or MINUTES not in text:
            run = ["env", "-u", "PYTHONPATH", "-u", "PYTEST_ADDOPTS", "bash", "-euc", text]
            printed.append(subprocess.run(run, cwd=checkout, capture_output=True, text=True, check=True).stdout)
    return printed


def contents(checkout: Path) -> dict[str, bytes]:
    """Return every file of the checkout that git does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=checkout, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name: (checkout / name).read_bytes() for name in names if (checkout / name).is_file()}


@pytest.mark.slow
def test_the_examples_touch_few_files_and_lead_to_what_tests_hold(tmp_path):
    checkout, guide = copied(tmp_path), GUIDE.read_text()
    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True)
    touched, printed = {}, {}
    for name in TOUCHED:
        before = contents(checkout)
        printed[name] = follow(example(guide, name), checkout)
        after = contents(checkout)
        changed = {file for file in before.keys() | after.keys() if before.get(file) != after.get(file)}
        assert GENERATED[name] <= changed
        touched[name] = sorted(changed - GENERATED[name])
        print(f"add a {name}: {len(touched[name])} files, {', '.join(touched[name])}")
    assert {name: len(files) for name, files in touched.items()} == TOUCHED
    locked, explained, tested = printed["patch"]
    assert "wrote fingerprints.lock.json" in locked and "declared in: verl_patches.utils.py_functional" in explained
    assert re.search(r"^[5-9] passed", tested, re.M), tested
    assert "node_throughput.enabled" in printed["feature"][-2]
    assert all(re.search(r"^\d+ passed", commands[-1], re.M) for commands in printed.values()), printed
    for tool in ("ruff check", "ruff format --check"):
        subprocess.run([f".venv/bin/{tool.split()[0]}", *tool.split()[1:], "."], cwd=checkout, check=True)


@pytest.mark.exhaustive
def test_the_model_of_the_example_is_resharded_byte_for_byte(tmp_path):
    printed = follow(example(GUIDE.read_text(), "model"), copied(tmp_path), minutes=True)
    assert len(printed) == 2 and re.search(r"^1 passed", printed[-1], re.M)


@pytest.mark.slow
def test_a_guide_whose_patch_does_nothing_fails(tmp_path):
    guide = example(GUIDE.read_text(), "patch")
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
