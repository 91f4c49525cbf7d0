"""Names, comments, messages and documents use the field's terms; tests/words.toml lists the replaced words."""

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENTRIES = tomllib.loads((ROOT / "tests" / "words.toml").read_text())["entry"]
# Third-party texts, records of past releases, and the table and its test.
NOT_OURS = re.compile(
    r".*\.(lock|patch|log|jsonl|parquet)|CHANGELOG\.md|LICENSE|docs/history/.*|tests/(words\.toml|test_words\.py)"
)


def pattern(word: str) -> re.Pattern:
    """Match the word by itself, between underscores, or as a capitalized part of a name."""
    return re.compile(rf"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))(?i:{word})(?![a-z])(?!(?<=[A-Z])[A-Z])")


def findings(path: str, text: str, entries: list[dict]) -> Iterator[str]:
    for entry in entries:
        if any(re.fullmatch(allowed, path) for allowed in entry.get("allowed", {})):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if found := pattern(entry["word"]).search(line):
                yield f"{path}:{number}: {found[0]!r}: write {entry['use']}"


def texts() -> Iterator[tuple[str, str]]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for path in listed.split("\0"):
        file = ROOT / path
        if path and not NOT_OURS.fullmatch(path) and file.is_file() and not file.is_symlink():
            try:
                yield path, file.read_text()
            except UnicodeDecodeError:
                continue


def test_no_replaced_word_is_in_the_tree():
    found = [line for path, text in texts() for line in findings(path, text, ENTRIES)]
    assert not found, "\n".join(found)


def test_every_exception_is_needed():
    tree = dict(texts())
    for entry in ENTRIES:
        for allowed, why in entry.get("allowed", {}).items():
            excepted = [text for path, text in tree.items() if re.fullmatch(allowed, path)]
            assert why and any(map(pattern(entry["word"]).search, excepted)), f"{allowed} has no {entry['word']}"


OPENING = re.compile(r'(?:"""|^\s*(?:#|//|///)|\s#) ?(?:What|Of|That|Where) (?!\{)')


def test_no_docstring_or_comment_opens_as_if_translated():
    """Sentences have a subject: "Bytes that a rank sends", and not "What a rank sends"."""
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in texts()
        if path.endswith((".py", ".cpp", ".h"))
        for number, line in enumerate(text.splitlines(), 1)
        if OPENING.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line", ['  """What a rank sends."""', "# Of several owners", "x = 1  # That is all", "// Where"]
)
def test_translated_opening_found(line):
    assert OPENING.search(f"{line} more")


@pytest.mark.parametrize("line", ['"""Whatever comes."""', "# Offload", 'say("What now")', "## What it prints"])
def test_other_opening_not_found(line):
    assert not OPENING.search(line)


@pytest.mark.parametrize("name", ["make_rig", "makeRig", "Rig", "RIGS", "the rig's", "rig2"])
def test_word_found_in_names(name):
    assert [*findings("a.py", f"x = 1\n{name} = 2\n", [{"word": "rigs?", "use": "worker processes"}])]


@pytest.mark.parametrize("name", ["right", "original", "trigger", "RIGHT", "brig"])
def test_word_inside_another_not_found(name):
    assert not [*findings("a.py", name, [{"word": "rigs?", "use": "worker processes"}])]
