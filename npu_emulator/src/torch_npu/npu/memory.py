"""What the caching allocator of a device reports. Every number is in bytes."""

import contextlib

from npu_emulator import _C

from .utils import DeviceLike, _get_device_index


def _statistics(device: DeviceLike) -> dict[str, int]:
    return _C.memory_statistics(_get_device_index(device))


def memory_allocated(device: DeviceLike = None) -> int:
    return _statistics(device)["allocated"]


def max_memory_allocated(device: DeviceLike = None) -> int:
    return _statistics(device)["peak_allocated"]


def memory_reserved(device: DeviceLike = None) -> int:
    return _statistics(device)["reserved"]


def max_memory_reserved(device: DeviceLike = None) -> int:
    return _statistics(device)["peak_reserved"]


memory_cached = memory_reserved
max_memory_cached = max_memory_reserved


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Free and total bytes of the device: what all processes on it have reserved is not free."""
    index = _get_device_index(device)
    return _C.free_bytes(index), _C.memory_statistics(index)["capacity"]


def empty_cache() -> None:
    _C.empty_cache()


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    _C.reset_peak_statistics(_get_device_index(device))


reset_max_memory_allocated = reset_max_memory_cached = reset_accumulated_memory_stats = reset_peak_memory_stats


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    now = _statistics(device)
    stats = {"num_alloc_retries": 0, "num_ooms": now["out_of_memory_errors"]}
    for kind, current, peak in (
        ("allocated", now["allocated"], now["peak_allocated"]),
        ("active", now["allocated"], now["peak_allocated"]),
        ("reserved", now["reserved"], now["peak_reserved"]),
    ):
        stats[f"{kind}_bytes.all.current"] = current
        stats[f"{kind}_bytes.all.peak"] = peak
    stats["allocation.all.allocated"] = now["allocations"]
    stats["allocation.all.freed"] = now["frees"]
    stats["allocation.all.current"] = now["allocations"] - now["frees"]
    stats["inactive_split_bytes.all.current"] = 0
    return stats


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    return "\n".join(f"{name:40} {value:>16,}" for name, value in sorted(memory_stats(device).items()))


def memory_snapshot() -> list:
    """Segments of the allocator; there are none to show."""
    return []


def set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    """Limit this process to a part of the device's capacity."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    index = _get_device_index(device)
    _C.set_limit(index, int(_C.memory_statistics(index)["capacity"] * fraction))


def get_allocator_backend() -> str:
    return "native"


class NPUPluggableAllocator:
    """An allocator of the caller's. Only that of vllm-ascend is emulated, which is in no library here."""

    def __init__(self, path_to_so_file: str | None, alloc_fn_name: str, free_fn_name: str):
        if path_to_so_file is not None:
            raise NotImplementedError(
                f"the allocator {alloc_fn_name} in {path_to_so_file} cannot manage emulated memory"
            )
        self._allocator = self

    def allocator(self) -> "NPUPluggableAllocator":
        return self


def change_current_allocator(allocator: NPUPluggableAllocator) -> None:
    raise NotImplementedError("change_current_allocator is not emulated")


class MemPool:
    """Memory apart from the rest; with an allocator, that one's owner may take it away and put it back."""

    def __init__(self, allocator: NPUPluggableAllocator | None = None):
        self.allocator = allocator


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: DeviceLike = None):
    """What this thread allocates inside comes from the pool."""
    before = _C.pool_is_active()
    _C.set_pool_active(pool.allocator is not None)
    try:
        yield
    finally:
        _C.set_pool_active(before)
