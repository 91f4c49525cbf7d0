"""The counters of the emulated CANN of this process, as `npu_emulator.meters` reads them."""

import ctypes
from collections.abc import Iterator

from .cann import library

_COPY_KINDS, _GRAPH_NUMBERS = 4, 3
_MEMORY = (
    "capacity", "allocated", "peak_allocated", "allocations", "frees", "out_of_memory_errors", "beside_programs",
)  # fmt: skip


def _lines(function: str) -> Iterator[str]:
    read = getattr(library(), function)
    read.restype = ctypes.c_char_p
    return iter(read().decode().splitlines())


def _numbers(function: str, count: int, *arguments: int) -> list[int]:
    numbers = (ctypes.c_int64 * count)()
    getattr(library(), function)(*arguments, numbers)
    return list(numbers)


def operator_calls() -> dict[str, int]:
    """Return the calls of operators by CANN's name; those in a graph count when it is replayed."""
    calls = (line.split(" ", 1) for line in _lines("npu_emulator_cann_operator_calls"))
    return {name: int(number) for number, name in calls}


def copies() -> list[tuple[int, int]]:
    """Return count and bytes of copies: host to device, device to host, on the device, transposing on the device."""
    numbers = _numbers("npu_emulator_cann_copies", 2 * _COPY_KINDS)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def collectives() -> list[tuple[str, int, int, int]]:
    """Return kind, ranks of the group, count, and bytes that this rank sent (for ``recv``, received)."""
    found = (line.split() for line in _lines("npu_emulator_cann_collectives"))
    return [(kind, int(ranks), int(count), int(size)) for kind, ranks, count, size in found]


def graphs() -> list[int]:
    """Return how many graphs were captured and replayed, and how much their replays did."""
    return _numbers("npu_emulator_cann_graphs", _GRAPH_NUMBERS)


def device_count() -> int:
    """Return how many devices this process sees."""
    count = ctypes.c_uint32()
    library().aclrtGetDeviceCount(ctypes.byref(count))
    return count.value


def memory_statistics(device: int) -> dict[str, int]:
    """Return the bytes of a device that this process holds, and how often it allocated, freed and ran out of memory.

    ``beside_programs`` is the part of those bytes that CANN holds for its context and HCCL for its communicators.
    """
    return dict(zip(_MEMORY, _numbers("npu_emulator_cann_memory", len(_MEMORY), device), strict=True))


def exchange_watermark(device: int, lowest: int) -> int:
    """Return the most bytes held of a device since the last call, and restart from ``lowest`` or the bytes held now."""
    exchange = library().npu_emulator_cann_exchange_watermark
    exchange.argtypes, exchange.restype = (ctypes.c_int, ctypes.c_int64), ctypes.c_int64
    return exchange(device, lowest)


def is_initialized() -> bool:
    """Whether this process has chosen a device."""
    return bool(library().npu_emulator_cann_is_used())
