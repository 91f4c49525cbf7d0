"""Reads files that users give: regular files only, of bounded size, in UTF-8, with bounded nesting and no key twice.

Every problem with a file is a `FileError` of one sentence that begins with its path; callers put their option first.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

# Limit for a configuration, a model's config.json or its index, which has 9 MB for a model of 671 billion parameters.
DOCUMENT_BYTES = 1 << 26
# Limit for files that a run appends to: 10 KB a step for 200,000 steps.
RECORDS_BYTES = 1 << 31
DEEPEST = 64
# Bytes by which a file may grow while it is read, and the most read from one whose size the kernel does not know.
_GROWTH = 1 << 20
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class FileError(ValueError):
    """A file cannot be used; the message is one sentence that begins with the path, without a full stop.

    Attributes:
        missing: Whether there is no such file.
    """

    def __init__(self, sentence: str, missing: bool = False) -> None:
        super().__init__(sentence)
        self.missing = missing


def read_bytes(path: Path, limit: int = DOCUMENT_BYTES) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; never wait for a pipe or a device.

    Raises:
        FileError: there is no such file, it is of another kind, longer, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            # Not more than the file holds: Python allocates memory for the size that is asked for.
            content = file.read(min(limit, os.fstat(file.fileno()).st_size + _GROWTH) + 1)
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        raise FileError(f"{path} cannot be read: {error.strerror}. Check the path", missing) from error
    except ValueError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{str(path)!r} is not a path ({error}). Check it") from error
    if len(content) > limit:
        raise FileError(f"{path} has more than {limit:,} bytes. Is it the right file?")
    return content


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; never wait for a pipe or a device.

    Raises:
        FileError: it is of another kind.
        OSError: it cannot be opened.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise FileError(f"{path} is {kind}. Pass a regular file")
    return file


def read_text(path: Path, limit: int = DOCUMENT_BYTES) -> str:
    """Return the text of a file without a leading byte-order mark. Raises FileError."""
    try:
        return read_bytes(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text (byte {error.start}). Convert it to UTF-8") from error


def read_lines(path: Path, count: int, limit: int = DOCUMENT_BYTES) -> Iterator[str]:
    """Yield the first `count` lines of a text that are not blank, reading at most `limit` bytes. Raises FileError.

    Only a line feed ends a line: JSON may contain the other separators that str.splitlines knows.
    """
    found, left = 0, limit
    try:
        with open_regular(path) as file:
            while found < count and (content := file.readline(left + 1)):
                left -= len(content)
                if left < 0:
                    raise FileError(f"{path}: its first {count} lines have more than {limit:,} bytes")
                line = content.decode("utf-8-sig" if not found else "utf-8").rstrip("\r\n")
                if line.strip():
                    found += 1
                    yield line
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}. Check the path") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text (after line {found}). Convert it to UTF-8") from error


def parse_json(text: str, place: str) -> Any:
    """Parse JSON without repeated keys and with at most DEEPEST levels. Raises FileError, which begins with `place`."""
    try:
        content = json.loads(text, object_pairs_hook=_without_repetition)
    except RecursionError as error:
        raise FileError(f"{place} is not readable JSON: it is nested too deeply") from error
    except ValueError as error:  # also raised for a number with more digits than Python converts
        raise FileError(f"{place} is not JSON ({_first_line(error)}). Correct it") from error
    _check_depth(content, place)
    return content


def read_json(path: Path, limit: int = DOCUMENT_BYTES) -> Any:
    """Return the JSON of a file; see `parse_json`. Raises FileError."""
    return parse_json(read_text(path, limit), str(path))


def read_object(path: Path, limit: int = DOCUMENT_BYTES) -> dict[str, Any]:
    """Return the JSON object of a file, such as a model's config.json. Raises FileError."""
    content = read_json(path, limit)
    if not isinstance(content, dict):
        raise FileError(f"{path} is JSON with {_kind(content)}. Pass a file with a JSON object")
    return content


def read_yaml(path: Path, limit: int = DOCUMENT_BYTES) -> Any:
    """Return the plain values of a YAML file: no repeated key, no alias, at most DEEPEST levels. Raises FileError."""
    import yaml

    text = read_text(path, limit)
    try:
        return yaml.load(text, Loader=_strict_loader())
    except RecursionError as error:
        raise FileError(f"{path} is nested too deeply: at most {DEEPEST} levels are read") from error
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as error:  # also for an impossible date or number
        raise FileError(f"{path} is not YAML ({' '.join(str(error).split())[:300]}). Correct it") from error


def _strict_loader() -> Any:
    """Return PyYAML's loader of plain values, made to reject repeated keys, aliases and deep nesting."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Loader with the nesting depth of the current node."""

        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent):
                raise yaml.YAMLError(f"line {event.start_mark.line + 1} has the alias *{event.anchor}. Write it out")
            if self.depth >= DEEPEST:
                raise yaml.YAMLError(f"line {event.start_mark.line + 1} is nested deeper than {DEEPEST} levels")
            self.depth += 1
            try:
                return super().compose_node(parent, index)
            finally:
                self.depth -= 1

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = set()
            for key_node, _ in node.value:
                key = (key_node.tag, str(key_node.value))
                if key in keys:
                    line = key_node.start_mark.line + 1
                    raise yaml.YAMLError(f"line {line} has the key {str(key_node.value)[:60]!r} a second time")
                keys.add(key)
            return super().construct_mapping(node, deep)

    return Loader


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key[:60]!r} occurs twice")
        made[key] = value
    return made


def _check_depth(content: Any, place: str) -> None:
    level, nodes = 0, [content]
    while nodes:
        level += 1
        if level > DEEPEST:
            raise FileError(f"{place} is nested too deeply: at most {DEEPEST} levels are read")
        inner: list[Any] = []
        for node in nodes:
            if isinstance(node, dict):
                inner += node.values()
            elif isinstance(node, list):
                inner += node
        nodes = [node for node in inner if isinstance(node, dict | list)]


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false"}
    return names.get(type(value), "nothing")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].partition("; use sys.")[0]
