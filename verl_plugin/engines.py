"""Adds to verl's training engines on NPUs, so that several additions hold at once."""

from __future__ import annotations

from typing import Any

from verl.workers.engine import EngineRegistry

_MODEL, _DEVICE, _VENDOR = "language_model", "npu", "huawei"


def has_engine(backend: str) -> bool:
    """Whether verl has a training engine of this backend here: each needs packages that may be missing."""
    return _DEVICE in EngineRegistry._engines.get(_MODEL, {}).get(backend, {})


def extend_engine(backend: str, extension: type) -> type:
    """Put the methods of a class before those of the engine that verl takes for `backend` on an NPU.

    verl's registry prefers an engine of the device's vendor to one of the device, and takes one of each: an engine that
    an earlier extension registered makes way for one that has both. verl's own stays where it is.

    Args:
        backend: `fsdp2` or `megatron`.
        extension: has methods of `BaseEngine`, which may call `super()`.

    Returns:
        The engine, registered.

    Raises:
        ValueError: verl has no engine of this backend here.
    """
    if not has_engine(backend):
        raise ValueError(f"verl has no training engine {backend!r} here: what it needs is not installed.")
    upstream = EngineRegistry.get_engine_cls(_MODEL, backend)
    # The registry has no way to give an engine up.
    EngineRegistry._engines[_MODEL][backend].pop((_DEVICE, _VENDOR), None)
    names: dict[str, Any] = {"__doc__": extension.__doc__, "__module__": extension.__module__}
    engine = type(extension.__name__, (extension, upstream), names)
    return EngineRegistry.register(model_type=_MODEL, backend=backend, device=_DEVICE, vendor=_VENDOR)(engine)
