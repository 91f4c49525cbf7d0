"""Tensors that enter and leave the device together.

Memory is taken and given back storage by storage (`resize_`), not by swapping `param.data`: every view of a storage,
whoever holds it, stays valid and none of them keeps the memory alive. Tensor objects stay the same; addresses may
change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from post_training.tensor_parts import copy_in_parts, zero_in_parts

Contents = Literal["kept", "zeroed", "rebuilt"]
Tensors = Callable[[], Iterable[torch.Tensor]]
Storages = dict[int, torch.UntypedStorage]


class Resident(Protocol):
    """An owner of device memory that can do without it for a while.

    Attributes:
        unmapped_bytes: bytes that torch's counters call allocated although no memory is behind them now.
    """

    @property
    def unmapped_bytes(self) -> int: ...

    def onload(self) -> int:
        """Take the memory and restore the contents, unless they are on the device. Returns the bytes copied."""

    def offload(self, changed: bool = True) -> int:
        """Give the memory back, if it is on the device. Returns the bytes copied.

        Args:
            changed: the contents may have been written since they came. If not, an earlier copy is used again.
        """


class StorageGroup:
    """Device storages behind a set of tensors.

    Args:
        tensors: evaluated at every offload, because optimizer state appears only with the first step. Host tensors
            among them are left alone.
        contents: `kept` copies to pinned host memory and back; `zeroed` comes back as zeros; `rebuilt` comes back
            undefined, for tensors that their owner writes before anybody reads them.
        excluding: tensors whose storages belong to another group.
        gives_back: whether the group frees and takes its memory itself; otherwise its owner removes it after an offload
            and restores it before an onload.
    """

    unmapped_bytes = 0

    def __init__(
        self, tensors: Tensors, contents: Contents = "kept", excluding: Tensors = tuple, gives_back: bool = True
    ):
        self._tensors = tensors
        self._contents = contents
        self._excluding = excluding
        self._gives_back = gives_back
        self._away: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._host: dict[int, torch.Tensor] = {}
        self._written: dict[int, int] = {}
        # While such a reference lives, no new storage object can get the address of the one that it refers to.
        self._known: dict[int, StorageWeakRef] = {}

    def offload(self, changed: bool = True) -> int:
        """Copy out kept contents without an up-to-date copy, then give every storage back. Returns the bytes copied."""
        if self._away:
            return 0
        with torch.inference_mode(False), torch.no_grad():
            leaving = self._present()
            copied = self._copy_out(leaving, changed)
            for key, storage in leaving.items():
                self._away[key] = (storage, storage.nbytes())
                if self._gives_back:
                    storage.resize_(0)
        return copied

    def copy_out(self, changed: bool = True) -> int:
        """Copy out kept contents without an up-to-date copy; nothing leaves the device. Returns the bytes copied."""
        if self._away:
            return 0
        with torch.inference_mode(False), torch.no_grad():
            return self._copy_out(self._present(), changed)

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a view of the last host copy of `tensor`'s elements; None if its storage was never copied out.

        The copy is valid until the group is copied out again, after something has written it.
        """
        held = self._host.get(tensor.untyped_storage()._cdata)
        if held is None:
            return None
        same = torch.empty(0, dtype=tensor.dtype)
        return same.set_(held.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def onload(self) -> int:
        """Take the storages' memory again and restore the contents. Returns the bytes that were copied."""
        with torch.inference_mode(False), torch.no_grad():
            for key, (storage, size) in self._away.items():
                if self._gives_back:
                    storage.resize_(size)
                if self._contents == "kept":
                    copy_in_parts(bytes_of(storage), self._host[key], non_blocking=True)
                elif self._contents == "zeroed":
                    zero_in_parts(bytes_of(storage))
            torch.npu.synchronize()
        copied = sum(size for _, size in self._away.values()) if self._contents == "kept" else 0
        self._away.clear()
        return copied

    def _present(self) -> Storages:
        """Return the group's storages that have memory."""
        excluded = device_storages(self._excluding())
        return {key: s for key, s in device_storages(self._tensors()).items() if key not in excluded and s.nbytes()}

    def _copy_out(self, present: Storages, changed: bool) -> int:
        self._forget_others(present)
        if self._contents != "kept":
            return 0
        stale = self._without_copy(present, changed)
        for key, storage in stale.items():
            copy_in_parts(self._host_copy(key, storage.nbytes()), bytes_of(storage), non_blocking=True)
        torch.npu.synchronize()
        return sum(storage.nbytes() for storage in stale.values())

    def _forget_others(self, leaving: Storages) -> None:
        """Drop the host copies of storages that are gone, or that the group no longer has."""
        self._host = {key: kept for key, kept in self._host.items() if key in leaving}
        self._known = {key: self._known.get(key) or StorageWeakRef(storage) for key, storage in leaving.items()}

    def _without_copy(self, leaving: Storages, changed: bool) -> Storages:
        """Return the storages of `leaving` without an up-to-date host copy.

        torch's version counters show undeclared writes too, if they went through a tensor of the group.
        """
        before, self._written = self._written, _writes(self._tensors())
        return {
            key: storage
            for key, storage in leaving.items()
            if changed or key not in self._host or self._written[key] != before.get(key)
        }

    def _host_copy(self, key: int, size: int) -> torch.Tensor:
        """Return a pinned host buffer of `size` bytes for the storage `key`, kept from step to step."""
        held = self._host.get(key)
        if held is None or held.numel() != size:
            held = self._host[key] = torch.empty(size, dtype=torch.uint8).pin_memory()
        return held


def device_storages(tensors: Iterable[torch.Tensor]) -> Storages:
    """Return the distinct device storages behind `tensors`, by the address of the storage object (not its memory)."""
    found: Storages = {}
    for tensor in tensors:
        if tensor.device.type == "npu":
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, storage)
    return found


def _writes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return how often each device storage behind `tensors` was written; inference tensors do not count writes."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if tensor.device.type == "npu":
            key = tensor.untyped_storage()._cdata
            found[key] = found.get(key, 0) + (0 if tensor.is_inference() else tensor._version)
    return found


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the storage as a tensor [bytes], uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
