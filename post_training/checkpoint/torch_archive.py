"""Streams zip archives of `torch.save` out, and reads them without running any code that they contain.

`torch.load` unpickles, so a file can make it call any function, and `weights_only=True` does not prevent that in
torch 2.5 (CVE-2025-32434). Here the pickle is only inspected: the few functions that rebuild tensors are our own, and
everything else that it names (arguments, optimizer classes) becomes an `Inert` object. Tensors are located, not loaded.
A DTensor becomes a `StoredPart`.
"""

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.records import Record
from post_training.checkpoint.regions import StoredTensor
from post_training.checkpoint.source import Source

_ALIGNMENT = 64
_ROOT = "archive"
_PROTOCOL = 2
"""The pickle protocol that torch's weights_only reader supports."""

_STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}
_DTYPES = {name: dtype for dtype, name in _STORAGES.items()}


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One rank's part of a DTensor.

    Attributes:
        tensor: the rank's elements.
        shape: of the whole tensor.
        dimension: along which it is cut over ranks; None if each rank has all of it.
    """

    tensor: StoredTensor
    shape: tuple[int, ...]
    dimension: int | None


class Inert:
    """Replaces an object of an archive that is not needed; it ignores everything that the pickle does with it.

    Attributes:
        arguments: of its class or function.
        content: its state, if it has one.
    """

    arguments: tuple[Any, ...]
    content: Any

    def __new__(cls, *arguments: Any, **_: Any) -> "Inert":  # a pickle may create objects without __init__
        made = super().__new__(cls)
        made.arguments, made.content = arguments, None
        return made

    def __call__(self, *_: Any, **__: Any) -> "Inert":
        return self

    def __setstate__(self, state: Any) -> None:
        self.content = state

    def __setitem__(self, *_: Any) -> None:
        return None

    def append(self, *_: Any) -> None:
        return None

    extend = append


def read_archive(path: Path) -> Any:
    """Return the object of a `torch.save` file, with every tensor in it replaced by its StoredTensor.

    Raises:
        CheckpointError: the file is truncated, damaged, compressed, or of torch's format before 1.6.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            with path.open("rb") as file:
                return _LocatingUnpickler(path, entries, file, archive.read(entries["data.pkl"])).load()
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path}: truncated, or not a file of torch.save ({error})") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path}: its pickle is damaged ({error!r})") from error


class _DTensor:
    """Stands for the class of DTensors."""


@cache
def _inert(name: str) -> type[Inert]:
    """Return a class of inert objects with the name of the class in whose place it stands."""
    return type(name, (Inert,), {})


class _LocatingUnpickler(pickle.Unpickler):
    """Builds dictionaries, lists and numbers, and locates tensors; calls no function of the pickle."""

    def __init__(self, path: Path, entries: dict[str, zipfile.ZipInfo], file: Any, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.path, self.entries, self.file = path, entries, file

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("collections", "defaultdict"):
            return _plain_dictionary
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._locate
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _unwrapped
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return self._from_type
        if name == "DTensor" and module.startswith("torch.distributed."):
            return _DTensor
        return _inert(name)

    def persistent_load(self, reference: tuple) -> StoredTensor:
        _, dtype, key, _, count = reference
        entry = self.entries.get(f"data/{key}")
        if not isinstance(dtype, torch.dtype) or entry is None:
            raise CheckpointError(f"{self.path}: storage {key} is missing or of an unknown type")
        tensor = StoredTensor(self.path, self._data_offset(entry), dtype, (count,))
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size < tensor.nbytes:
            raise CheckpointError(f"{self.path}: storage {key} is compressed or cut off")
        return tensor

    def _data_offset(self, entry: zipfile.ZipInfo) -> int:
        self.file.seek(entry.header_offset)
        header = self.file.read(30)
        if header[:4] != b"PK\x03\x04":
            raise CheckpointError(f"{self.path}: entry {entry.filename} is damaged")
        name, extra = struct.unpack("<HH", header[26:30])
        return entry.header_offset + 30 + name + extra

    def _from_type(self, rebuild: Any, kind: Any, arguments: tuple, state: Any) -> Any:
        """Locate the elements of a DTensor, whose tensor is in its state."""
        if kind is not _DTensor:
            return _unwrapped(rebuild, kind, arguments, state)
        slots = state[1] if isinstance(state, tuple) else state
        placements = slots["_spec"].content["placements"]
        cut = [_dimension(self.path, placement) for placement in placements]
        dimensions = [each for each in cut if each is not None]
        if len(dimensions) > 1:
            raise CheckpointError(f"{self.path}: a tensor is cut along several dimensions of its mesh")
        return StoredPart(slots["_local_tensor"], tuple(arguments[2]), dimensions[0] if dimensions else None)

    def _locate(self, storage: StoredTensor, start: int, shape: tuple, stride: tuple, *_: Any) -> StoredTensor:
        contiguous = torch.empty(shape, device="meta").stride()
        count = torch.Size(shape).numel()
        if count and (tuple(stride) != contiguous or start + count > storage.shape[0]):
            raise CheckpointError(f"{self.path}: a tensor of shape {tuple(shape)} is not contiguous in its storage")
        return StoredTensor(storage.file, storage.offset + start * storage.dtype.itemsize, storage.dtype, tuple(shape))


def _plain_dictionary(*_: Any) -> dict[Any, Any]:
    """Replace a defaultdict, which MindSpeed-LLM's converter saves: a lookup would call its factory."""
    return {}


def _dimension(path: Path, placement: Inert) -> int | None:
    """Return the dimension that a placement of a DTensor cuts; None if each rank has the whole tensor."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return None
    if kind != "Shard":
        raise CheckpointError(f"{path}: a tensor is placed as {kind}, of which no rank has a part of the weight")
    found = placement.content if placement.content is not None else placement.arguments
    return int(found["dim"] if isinstance(found, dict) else found[0])


def _unwrapped(*arguments: Any) -> Any:
    """Return the data of a parameter or a tensor subclass."""
    located = [argument for argument in arguments if isinstance(argument, StoredTensor)]
    return located[0] if located else Inert()


def archive_bytes(content: dict[str, Any]) -> int:
    """Return an upper bound of the size of `stream_archive`'s file, too large by less than 1 KiB per tensor."""
    pickled, records = _pickled(content)
    return len(pickled) + 4096 + sum(record.nbytes + 1024 for record in records)


def stream_archive(content: dict[str, Any], source: Source) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the file that `torch.save(content)` would write, with every Record in it as a tensor.

    Sizes and checksums follow the data of each entry (a zip data descriptor), so nothing is written twice.
    """
    pickled, records = _pickled(content)
    zipped = _ZipStream()
    yield from zipped.entry("data.pkl", len(pickled), iter([pickled]))
    yield from zipped.entry("byteorder", 6, iter([b"little"]))
    for key, record in enumerate(records):
        yield from zipped.entry(f"data/{key}", record.nbytes, record.stream(source))
    yield from zipped.entry("version", 2, iter([b"3\n"]))
    yield zipped.directory()


class _RecordPickler(pickle.Pickler):
    """Pickles a Record as torch pickles a tensor: as a call of _rebuild_tensor_v2 on a storage of the archive."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.records: list[Record] = []

    def persistent_id(self, item: Any) -> tuple | None:
        if not isinstance(item, _StorageKey):
            return None
        count = torch.Size(item.record.shape).numel()
        return ("storage", getattr(torch, _STORAGES[item.record.dtype]), str(item.key), "cpu", count)

    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, Record):
            return NotImplemented
        self.records.append(item)
        storage = _StorageKey(item, len(self.records) - 1)
        strides = torch.empty(item.shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (storage, 0, tuple(item.shape), strides, False, OrderedDict())


class _StorageKey:
    def __init__(self, record: Record, key: int) -> None:
        self.record, self.key = record, key


def _pickled(content: dict[str, Any]) -> tuple[bytes, list[Record]]:
    file = io.BytesIO()
    pickler = _RecordPickler(file)
    pickler.dump(content)
    return file.getvalue(), pickler.records


class _ZipStream:
    """A zip archive without compression, written front to back; every entry's data start at a multiple of 64."""

    def __init__(self) -> None:
        self.position = 0
        self.central: list[bytes] = []

    def entry(self, name: str, size: int, chunks: Iterator[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Yield one entry. The local header has the sizes too; only the checksum is not known before the data."""
        path, header_at = f"{_ROOT}/{name}".encode(), self.position
        zip64 = struct.pack("<HHQQ", 1, 16, size, size)
        padding = -(header_at + 30 + len(path) + len(zip64) + 4) % _ALIGNMENT
        extra = zip64 + struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        fields = struct.pack("<HHHHH", 45, 1 << 3 | 1 << 11, zipfile.ZIP_STORED, 0, 33)
        header = b"PK\x03\x04" + fields + struct.pack("<III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
        yield header + struct.pack("<HH", len(path), len(extra)) + path + extra
        checksum = 0
        for chunk in chunks:
            checksum = zlib.crc32(chunk, checksum)
            yield chunk
        yield b"PK\x07\x08" + struct.pack("<IQQ", checksum, size, size)
        self.position += 30 + len(path) + len(extra) + size + 24
        located = struct.pack("<HHQQQ", 1, 24, size, size, header_at)
        sizes = struct.pack("<III", checksum, 0xFFFFFFFF, 0xFFFFFFFF)
        lengths = struct.pack("<HHHHHII", len(path), len(located), 0, 0, 0, 0, 0xFFFFFFFF)
        self.central.append(b"PK\x01\x02" + struct.pack("<H", 45) + fields + sizes + lengths + path + located)

    def directory(self) -> bytes:
        """Return the central directory with its zip64 end records."""
        entries, count, start = b"".join(self.central), len(self.central), self.position
        end64 = struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, len(entries), start)
        locator = struct.pack("<IQI", 0, start + len(entries), 1)
        end = struct.pack("<HHHHIIH", 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
        return entries + b"PK\x06\x06" + end64 + b"PK\x06\x07" + locator + b"PK\x05\x06" + end
