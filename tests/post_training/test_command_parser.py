"""Help texts wrap to the terminal's width, at most 80 columns, and keep indented lines."""

import pytest

from post_training.arguments import finite, whole
from post_training.command_parser import CommandParser

DESCRIPTION = """Compare two checkpoints bit for bit, in any pair of their forms with --no-two-at-once, and more words.

A second paragraph, which is
written over two lines.
    python scripts/verify.py LEFT RIGHT \\
        --workers 2
After the example a new line begins."""


@pytest.mark.parametrize("columns, widest", [(40, 38), (80, 78), (200, 78)])
def test_prose_is_reflowed_to_the_terminal(columns, widest, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    prose = CommandParser(description=DESCRIPTION).format_help().partition("\n\n")[2].partition("\n\n")[0]
    lines = prose.splitlines()
    assert " ".join(lines) == DESCRIPTION.splitlines()[0]
    words = [line.split()[0] for line in lines[1:]]
    assert max(map(len, lines)) <= widest < min(len(f"{line} {word}") for line, word in zip(lines, words, strict=False))


def test_indented_lines_stay_as_they_are(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = CommandParser(description=DESCRIPTION).format_help()
    assert "A second paragraph, which is written\nover two lines.\n    python scripts/verify.py LEFT RIGHT \\\n" in text
    assert "        --workers 2\nAfter the example a new line begins.\n" in text


def test_placeholder_of_a_number_follows_from_its_type(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = CommandParser()
    parser.add_argument("--a", type=int)
    parser.add_argument("--b", type=whole(1))
    parser.add_argument("--c", type=float)
    parser.add_argument("--d", type=finite(above=0))
    parser.add_argument("--e", type=int, metavar="PORT")
    assert "[--a N] [--b N] [--c X] [--d X] [--e PORT]" in parser.format_help()
