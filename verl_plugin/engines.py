"""Extends verl's training engines on NPUs, so that several extensions work together."""

from __future__ import annotations

from typing import Any

from verl.workers.engine import EngineRegistry

_MODEL, _DEVICE, _VENDOR = "language_model", "npu", "huawei"


def has_engine(backend: str) -> bool:
    """Return whether verl has a training engine of this backend here: each needs packages that may be missing."""
    return _DEVICE in EngineRegistry._engines.get(_MODEL, {}).get(backend, {})


def extend_engine(backend: str, extension: type) -> type:
    """Put the methods of a class before those of the engine that verl takes for `backend` on an NPU.

    verl's registry prefers an engine of the device's vendor to one of the device, and takes one of each. So an engine
    that an earlier extension registered is replaced by one with both extensions; verl's own stays registered.

    Args:
        backend: `fsdp2` or `megatron`.
        extension: has methods of `BaseEngine`, which may call `super()`.

    Returns:
        The engine, registered.

    Raises:
        ValueError: verl has no engine of this backend here.
    """
    if not has_engine(backend):
        raise ValueError(f"verl has no training engine {backend!r} here: its dependencies are not installed.")
    upstream = EngineRegistry.get_engine_cls(_MODEL, backend)
    # The registry has no way to unregister an engine.
    EngineRegistry._engines[_MODEL][backend].pop((_DEVICE, _VENDOR), None)
    names: dict[str, Any] = {"__doc__": extension.__doc__, "__module__": extension.__module__}
    engine = type(extension.__name__, (extension, upstream), names)
    return EngineRegistry.register(model_type=_MODEL, backend=backend, device=_DEVICE, vendor=_VENDOR)(engine)
