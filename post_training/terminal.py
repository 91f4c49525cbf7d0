"""Escape text from users and files before it is printed, so that no character of it controls the terminal.

The name of a column or file, or a fault, may carry escape sequences that clear a screen, change a title or hide text.
"""

import sys
import unicodedata
from typing import Any, TextIO

# Control characters, format characters such as overrides of the writing direction, lone surrogates from names that are
# not UTF-8, private characters, and separators of lines and paragraphs.
_ESCAPED = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def escaped(text: str) -> str:
    """Return the text with such characters written as in Python (`\\x1b`); line feeds and tabs stay."""
    if text.isprintable():
        return text
    return "".join(_escaped(character) for character in text)


def _escaped(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _ESCAPED:
        return character
    return character.encode("unicode_escape").decode()


class EscapingStream:
    """A text stream that writes `escaped` text into another one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text; a leading carriage return, as in a progress bar, stays."""
        start = "\r" if text.startswith("\r") else ""
        self._stream.write(start + escaped(text[len(start) :]))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def escape_output(standard_output: bool = True) -> None:
    """Make this process print only `escaped` text.

    Args:
        standard_output: False if it carries colours of our own, and names in it are escaped one by one.
    """
    sys.stderr = EscapingStream(sys.stderr)
    if standard_output:
        sys.stdout = EscapingStream(sys.stdout)
