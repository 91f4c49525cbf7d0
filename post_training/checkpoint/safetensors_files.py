"""The safetensors format: reads headers strictly, and streams files out.

A file consists of 8 bytes with the header's length, the header in JSON, and the tensors' bytes without gaps.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.records import Record
from post_training.checkpoint.regions import StoredTensor
from post_training.checkpoint.source import Source
from post_training.user_files import FileError, open_regular, parse_json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_LONGEST_HEADER = 100_000_000
_AGAIN = "Download it again"


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Map the names of a file's tensors to their positions.

    Raises:
        CheckpointError: the file is shorter or longer than its header says, or is no safetensors file.
    """
    size, length, content = _read(path)
    content.pop("__metadata__", None)
    try:
        tensors = {name: _stored(path, 8 + length, entry) for name, entry in content.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its header is damaged ({error!r}). {_AGAIN}") from error
    _check_tiling(path, 8 + length, size, tensors)
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """Return a file's metadata. Raises CheckpointError if it is no safetensors file."""
    metadata = _read(path)[2].get("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: its header is damaged. {_AGAIN}")
    return metadata


def _read(path: Path) -> tuple[int, int, dict[str, Any]]:
    """Return the size of the file, the length of its header, and the header."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _LONGEST_HEADER + 1
            if length > min(_LONGEST_HEADER, size):
                raise CheckpointError(f"{path}: not a safetensors file, or cut off in its header. {_AGAIN}")
            content = parse_json(file.read(length).decode(), f"{path}: its header")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        if isinstance(error, FileError):
            raise CheckpointError(f"{error}; {_AGAIN}") from error
        raise CheckpointError(f"{path}: its header is not JSON. {_AGAIN}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: its header is not a JSON object. {_AGAIN}")
    return size, length, content


def _stored(path: Path, data_start: int, entry: dict) -> StoredTensor:
    start, stop = entry["data_offsets"]
    if not all(type(each) is int and each >= 0 for each in (start, stop, *entry["shape"])):
        raise ValueError(f"{entry} has a size that is not a whole number")
    tensor = StoredTensor(path, data_start + start, DTYPES[entry["dtype"]], tuple(entry["shape"]))
    if stop - start != tensor.nbytes:
        raise ValueError(f"{entry} has a size that does not match its shape")
    return tensor


def _check_tiling(path: Path, start: int, size: int, tensors: dict[str, StoredTensor]) -> None:
    """Check that the tensors fill the file from the header to its end without gaps or overlaps."""
    position = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != position:
            raise CheckpointError(f"{path}: tensors overlap or leave a hole at byte {position}. {_AGAIN}")
        position += tensor.nbytes
    if position != size:
        what = "truncated" if position > size else "longer than its header says"
        raise CheckpointError(f"{path}: {what}: {size} bytes instead of {position}. {_AGAIN}")


def file_bytes(records: list[Record]) -> int:
    """Return the size of the file that `stream` writes."""
    return len(header(_ordered(records))) + sum(record.nbytes for record in records)


def stream(records: list[Record], source: Source) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file with these records, in order."""
    ordered = _ordered(records)
    yield header(ordered)
    for record in ordered:
        yield from record.stream(source)


def _ordered(records: Iterable[Record]) -> list[Record]:
    """Sort records with wider types first, so that every tensor starts at a multiple of its element's size."""
    return sorted(records, key=lambda record: -record.dtype.itemsize)


def header(records: list[Record], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a file, with its length, whose tensors are these records in this order."""
    entries: dict[str, dict] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    position = 0
    for record in records:
        stop = position + record.nbytes
        entries[record.name] = {
            "dtype": NAMES[record.dtype],
            "shape": list(record.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
