"""Mask secrets in a process's own output and in the output of the processes that it starts."""

from __future__ import annotations

import codecs
import os
import re
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, TextIO

from post_training.masking.shapes import KEY_BEGINS, KEY_ENDS
from post_training.masking.values import Secrets

# A longer line is masked in parts, and text without a line ending is shown after `_SHOWN_AFTER_S` seconds.
_LONGEST_LINE = 1 << 18
_OVERLAP = 1 << 13
_SHOWN_AFTER_S = 0.5
_READ_BYTES = 1 << 16
_LINE_END = re.compile(r"(\r\n|\r|\n)")
# The end of a text that may turn out to begin the first line of a private key.
_KEY_MAY_BEGIN = re.compile(r"-----(?:B|BE|BEG|BEGI|BEGIN[^\r\n]*)$|-{1,5}$")


class MaskingWriter:
    """Takes text in chunks and passes masked lines on; a secret may be split over two chunks.

    Args:
        secrets: to be masked.
        write: receives the masked text, whole lines if there are any.
    """

    def __init__(self, secrets: Secrets, write: Callable[[str], Any]) -> None:
        self._secrets, self._write, self._pending, self._is_in_key = secrets, write, "", False

    def feed(self, text: str) -> None:
        """Pass the complete lines on."""
        *lines, self._pending = _LINE_END.split(self._pending + text)
        for line, ending in zip(lines[::2], lines[1::2], strict=True):
            self._write(self._line(line + ending))
        if len(self._pending) > _LONGEST_LINE:
            # The end is kept back in masked form, so that a secret in it is not split again.
            whole = self._secrets.text(self._pending)
            self._write(whole[:-_OVERLAP])
            self._pending = whole[-_OVERLAP:]

    def flush(self, at_end: bool = False) -> None:
        """Pass on text without a line ending yet, unless it may belong to a private key.

        Args:
            at_end: whether no more text comes.
        """
        if self._is_in_key or (not at_end and _KEY_MAY_BEGIN.search(self._pending)):
            return
        pending, self._pending = self._pending, ""
        if pending:
            self._write(self._secrets.text(pending))

    def _line(self, line: str) -> str:
        """Mask a line; the many lines of a private key become one mask."""
        if self._is_in_key:
            self._is_in_key = KEY_ENDS.search(line) is None
            return ""
        self._is_in_key = KEY_BEGINS.search(line) is not None and KEY_ENDS.search(line) is None
        ending = "\n" if self._is_in_key else ""
        return self._secrets.text(line) + ending


class _MaskedStream:
    """A text stream that masks what is written to it; everything else is the stream's own."""

    def __init__(self, stream: TextIO, secrets: Secrets) -> None:
        self._stream, self._secrets = stream, secrets

    def write(self, text: str) -> int:
        self._stream.write(self._secrets.text(text) if text.strip() else text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def masked_output(secrets: Secrets | None = None) -> Iterator[Secrets]:
    """Mask the output of `print`, `logging` and `traceback` of this process while the block lasts.

    The output of Ray's workers is masked too, because Ray prints it in the driver.
    """
    known = secrets or Secrets()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_MaskedStream(stream, known) for stream in before)
    try:
        yield known
    finally:
        sys.stdout, sys.stderr = before


class _MaskingCopy:
    """Takes bytes in chunks and passes them on masked; bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, secrets: Secrets, write: Callable[[bytes], Any]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._writer = MaskingWriter(secrets, lambda text: write(text.encode()))

    def feed(self, content: bytes) -> None:
        """Pass the complete lines on; empty content means the end."""
        self._writer.feed(self._decoder.decode(content, final=not content))
        if not content:
            self._writer.flush(at_end=True)

    def flush(self) -> None:
        """Pass on text without a line ending yet."""
        self._writer.flush()


def copy_masked(source: int, secrets: Secrets, write: Callable[[bytes], Any]) -> None:
    """Read a pipe to its end and pass its content on, masked, line by line.

    Args:
        source: the descriptor to read.
        secrets: to be masked.
        write: receives the masked bytes.
    """
    copy = _MaskingCopy(secrets, write)
    while True:
        if not select.select([source], [], [], _SHOWN_AFTER_S)[0]:
            copy.flush()
            continue
        content = os.read(source, _READ_BYTES)
        copy.feed(content)
        if not content:
            return


def copy_masked_file(source: BinaryIO, secrets: Secrets, write: Callable[[bytes], Any]) -> None:
    """Do the same for a file, up to its present end."""
    copy = _MaskingCopy(secrets, write)
    while content := source.read(_READ_BYTES):
        copy.feed(content)
    copy.feed(b"")
