"""Output files of a conversion: their sizes are known in advance, their bytes are produced as they are written."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from post_training.checkpoint import safetensors_files, torch_archive
from post_training.checkpoint.records import Record
from post_training.checkpoint.source import Source

Chunks = Iterator[bytes | memoryview]

_COPY_BYTES = 4 << 20


class OutputFile(Protocol):
    """A file that a conversion writes.

    Attributes:
        path: relative to the output folder.
        space: bytes to reserve, not less than `stream` yields.
        buffer: bytes of the largest buffer that `stream` needs.
    """

    @property
    def path(self) -> str: ...

    @property
    def space(self) -> int: ...

    @property
    def buffer(self) -> int: ...

    def stream(self, source: Source) -> Chunks: ...


@dataclass(frozen=True)
class SafetensorsFile:
    path: str
    records: list[Record]

    @cached_property
    def space(self) -> int:
        return safetensors_files.file_bytes(self.records)

    @cached_property
    def buffer(self) -> int:
        return max((record.buffer_bytes for record in self.records), default=0)

    def stream(self, source: Source) -> Chunks:
        return safetensors_files.stream(self.records, source)


@dataclass(frozen=True)
class ArchiveFile:
    """A file in torch.save's format; Records in `content`'s dictionaries become tensors."""

    path: str
    content: dict[str, Any]

    @cached_property
    def records(self) -> list[Record]:
        models = [value for value in self.content.values() if isinstance(value, dict)]
        return [record for model in models for record in model.values()]

    @cached_property
    def space(self) -> int:
        return torch_archive.archive_bytes(self.content)

    @cached_property
    def buffer(self) -> int:
        return max((record.buffer_bytes for record in self.records), default=0)

    def stream(self, source: Source) -> Chunks:
        return torch_archive.stream_archive(self.content, source)


@dataclass(frozen=True)
class CopiedFile:
    path: str
    original: Path

    @property
    def space(self) -> int:
        return self.original.stat().st_size

    @property
    def buffer(self) -> int:
        return _COPY_BYTES

    def stream(self, source: Source) -> Chunks:
        with self.original.open("rb") as file:
            while chunk := file.read(_COPY_BYTES):
                yield chunk


@dataclass(frozen=True)
class TextFile:
    path: str
    text: str

    @property
    def space(self) -> int:
        return len(self.text.encode())

    @property
    def buffer(self) -> int:
        return self.space

    def stream(self, source: Source) -> Chunks:
        yield self.text.encode()
