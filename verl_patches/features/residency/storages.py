"""Tensors that enter and leave the device together.

Memory is taken and given back storage by storage (`resize_`), not by swapping `param.data`: every view of a storage,
whoever holds it, stays valid and none of them keeps the memory alive. The same Tensor objects serve before and after;
addresses may change.
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
    """Something that takes device memory and can do without it for a while.

    unmapped_bytes: what torch's counters call allocated now although there is no memory behind it.
    """

    @property
    def unmapped_bytes(self) -> int: ...

    def onload(self) -> int:
        """Take the memory and make the contents right; nothing happens if it is on the device. Returns bytes copied."""

    def offload(self, changed: bool = True) -> int:
        """Give the memory back; nothing happens if it is not on the device. Returns bytes copied.

        changed: somebody may have written the contents since they came. If not, an earlier copy serves again.
        """


class StorageGroup:
    """Device storages behind a set of tensors.

    Args:
        tensors: evaluated at every offload, because optimizer state appears only with the first step. Host tensors
            among them are left alone.
        contents: `kept` copies to pinned host memory and back; `zeroed` comes back as zeros; `rebuilt` comes back
            undefined, for tensors that their owner writes before anybody reads them.
        excluding: tensors whose storages belong to another group.
        gives_back: whether the group's memory is its own to give back; otherwise somebody takes it away after an
            offload and puts it back before an onload.
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
        # While one lives, no other storage gets the address of the one that it is of.
        self._known: dict[int, StorageWeakRef] = {}

    def offload(self, changed: bool = True) -> int:
        """Copy out what is kept and has no good copy yet, then give every storage back. Returns the bytes copied."""
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
        """Copy out what is kept and has no good copy yet; everything stays where it is. Returns the bytes copied."""
        if self._away:
            return 0
        with torch.inference_mode(False), torch.no_grad():
            return self._copy_out(self._present(), changed)

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The elements of `tensor` as they were last copied out, without a copy; None if its storage never was.

        They stay until the group is copied out again: until something has written it, and it leaves.
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
        """The group's storages that have memory."""
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
        """Those of `leaving` whose bytes the host does not hold. A write that nobody declared shows in torch's version
        counters, if it went through a tensor of the group."""
        before, self._written = self._written, _writes(self._tensors())
        return {
            key: storage
            for key, storage in leaving.items()
            if changed or key not in self._host or self._written[key] != before.get(key)
        }

    def _host_copy(self, key: int, size: int) -> torch.Tensor:
        """A pinned host buffer of `size` bytes for the storage `key`, kept from step to step."""
        held = self._host.get(key)
        if held is None or held.numel() != size:
            held = self._host[key] = torch.empty(size, dtype=torch.uint8).pin_memory()
        return held


def device_storages(tensors: Iterable[torch.Tensor]) -> Storages:
    """The distinct device storages behind `tensors`, by the address of the storage object (not of its memory)."""
    found: Storages = {}
    for tensor in tensors:
        if tensor.device.type == "npu":
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, storage)
    return found


def _writes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """How often the device storages behind `tensors` were written; inference tensors do not count their writes."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if tensor.device.type == "npu":
            key = tensor.untyped_storage()._cdata
            found[key] = found.get(key, 0) + (0 if tensor.is_inference() else tensor._version)
    return found


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a tensor [bytes], uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
