"""Devices and streams: which are there, which are current, and waiting for them."""

import dataclasses
import threading

import torch

from npu_emulator import _C
from npu_emulator.chip import CHIP

from . import streams
from .streams import Stream

DeviceLike = torch.device | int | str | None

device_count = _C.device_count
current_device = _C.current_device


def _get_device_index(device: DeviceLike = None, optional: bool = False) -> int:
    """The index of a device; of the current one if `device` is None or has none."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return current_device() if device < 0 else device
    device = torch.device(device)
    if device.type != "npu":
        raise ValueError(f"Expected a npu device, but got: {device}")
    return current_device() if device.index is None else device.index


def is_available() -> bool:
    return device_count() > 0


def set_device(device: DeviceLike) -> None:
    index = _get_device_index(device)
    if index >= 0:
        _C.set_device(index)


def synchronize(device: DeviceLike = None) -> None:
    """Wait for the device: all it does is done, except collectives that are deferred on purpose."""
    streams.wait_on_host("torch.npu.synchronize")


def get_device_name(device: DeviceLike = None) -> str:
    return CHIP.name


def get_soc_version() -> int:
    return CHIP.soc_version


@dataclasses.dataclass(frozen=True)
class _NPUDeviceProperties:
    name: str
    total_memory: int  # bytes
    multi_processor_count: int = 20
    major: int = 0
    minor: int = 0


def get_device_properties(device: DeviceLike = None) -> _NPUDeviceProperties:
    return _NPUDeviceProperties(CHIP.name, _C.memory_statistics(_get_device_index(device))["capacity"])


def get_device_capability(device: DeviceLike = None) -> None:
    """An NPU has no capability number; None, as on the real device."""


def can_device_access_peer(device_id: int, peer_device_id: int) -> bool:
    return 0 <= device_id < device_count() and 0 <= peer_device_id < device_count()


def utilization(device: DeviceLike = None) -> int:
    return 0


class device:
    """Context manager that makes a device the current one."""

    def __init__(self, device: DeviceLike):
        self.idx = -1 if device is None else _get_device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        if self.idx >= 0:
            _C.set_device(self.idx)

    def __exit__(self, *exception) -> bool:
        if self.idx >= 0:
            _C.set_device(self.prev_idx)
        return False


class device_of(device):
    """Context manager that makes the device of a tensor the current one, if it is an NPU."""

    def __init__(self, obj):
        super().__init__(obj.device.index if obj.device.type == "npu" else None)


_current = threading.local()
_default_streams: dict[int, Stream] = {}


def default_stream(device: DeviceLike = None) -> Stream:
    index = _get_device_index(device)
    if index not in _default_streams:
        _default_streams[index] = Stream(device=index, stream_id=0)
    return _default_streams[index]


def current_stream(device: DeviceLike = None) -> Stream:
    index = _get_device_index(device)
    return _current.__dict__.get(index) or default_stream(index)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _current.__dict__[stream.device_index] = stream
        if streams.capture is not None:
            streams.capture.enter(stream)


class StreamContext:
    """Context manager that makes a stream the current one of its device; None changes nothing."""

    def __init__(self, stream: Stream | None):
        self.stream = stream
        self.src_prev_stream: Stream | None = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self.src_prev_stream = current_stream(self.stream.device_index)
            set_stream(self.stream)

    def __exit__(self, *exception) -> None:
        if self.stream is not None:
            set_stream(self.src_prev_stream)


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)


def current_blas_handle() -> int:
    return 0


def is_bf16_supported() -> bool:
    return True


def is_support_inf_nan() -> bool:
    return True


def get_npu_overflow_flag() -> bool:
    """Whether an operator overflowed in saturation mode, which is not emulated: infinities and NaN are kept instead."""
    return False


def clear_npu_overflow_flag() -> None:
    """Does nothing: see get_npu_overflow_flag."""


def npu_check_overflow(grad) -> bool:
    """Whether a tensor or number holds an infinity or NaN."""
    if isinstance(grad, torch.Tensor):
        return not bool(torch.isfinite(grad.float().sum()))
    return grad in (float("inf"), -float("inf")) or grad != grad
