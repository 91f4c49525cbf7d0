"""Memory of a die through CANN's own calls, and CANN's own share of it; started by `test_die_memory`.

    python -m tests.npu_emulator.die_memory_program RESULT CHECK [RANK STORE]

Writes what the check returns into RESULT.
"""

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

from npu_emulator import counters, engine

KIB, MIB = 1 << 10, 1 << 20
HUGE_FIRST, HUGE_ONLY, NORMAL_ONLY = range(3)
RANKS = 2


class Die:
    """Die 0 through libascendcl; sizes in bytes."""

    def __init__(self) -> None:
        self._cann = engine.library()
        assert self._cann.aclrtSetDevice(0) == 0

    def taken(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert self._cann.aclrtGetMemInfo(1, ctypes.byref(free), ctypes.byref(total)) == 0
        return total.value - free.value

    def code(self, size: int, policy: int = HUGE_FIRST, exact: bool = True) -> int:
        """Allocate memory and return the call's code; the address is kept for the caller as `last`.

        Args:
            size: bytes.
            policy: of the pages.
            exact: whether to call aclrtMallocAlign32, which adds nothing to a multiple of 32.
        """
        self.last = ctypes.c_void_p()
        call = self._cann.aclrtMallocAlign32 if exact else self._cann.aclrtMalloc
        return call(ctypes.byref(self.last), ctypes.c_size_t(size), policy)

    def give(self, size: int, policy: int = HUGE_FIRST, exact: bool = True) -> ctypes.c_void_p:
        assert self.code(size, policy, exact) == 0
        return self.last

    def free(self, *blocks: ctypes.c_void_p) -> None:
        for block in blocks:
            assert self._cann.aclrtFree(block) == 0


def sizes() -> list[int]:
    """Return the KiB that each block takes of an empty die."""
    die, found = Die(), []
    asked = [
        (2 * MIB, HUGE_FIRST, True),
        (2 * MIB, HUGE_FIRST, False),
        (2 * MIB + 1, HUGE_FIRST, True),
        (4 * KIB, HUGE_ONLY, True),
        (3 * MIB, NORMAL_ONLY, True),
        (MIB, HUGE_FIRST, True),
    ]
    for one in asked:
        before, block = die.taken(), die.give(*one)
        found.append((die.taken() - before) // KIB)
        die.free(block)
        assert die.taken() == before
    return found


def fragmentation() -> dict[str, list[int]]:
    """On a die of 16 MiB: the MiB in use, and whether a large block can be allocated."""
    die = Die()
    small = [die.give(64 * KIB) for _ in range(64)]
    taken = [die.taken() // MIB]
    die.free(*small[1:40], *small[41:])
    taken.append(die.taken() // MIB)  # a block is left in each frame
    codes = [die.code(14 * MIB, HUGE_ONLY)]
    die.free(small[0])
    codes.append(die.code(14 * MIB, HUGE_ONLY))
    taken.append(die.taken() // MIB)
    # Only pages of the last small block's frame are free.
    codes += [die.code(MIB + 512 * KIB, HUGE_ONLY), die.code(MIB + 512 * KIB), die.code(512 * KIB)]
    taken.append(die.taken() // MIB)
    return {"taken": taken, "codes": codes}


def refusals() -> list[int]:
    die = Die()
    return [die.code(0), die.code(64 * MIB), die.code(MIB)]


def context() -> dict[str, int]:
    """Return the MiB in use before any allocation, and after the device was reset."""
    die = Die()
    taken = die.taken() // MIB
    assert engine.library().aclrtResetDevice(0) == 0
    return {"taken": taken, "reset": die.taken() // MIB}


def buffers() -> dict[str, object]:
    """Return the MiB of a die that communicators hold after the first group, after its first collective, and so on."""
    rank = int(sys.argv[3])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", store=dist.FileStore(sys.argv[4], RANKS), rank=rank, world_size=RANKS)
    others, tensor = [dist.new_group([0, 1])], torch.ones(4, device=f"npu:{rank}")
    held = []

    def after(do: Callable[[], object]) -> None:
        do()
        torch.npu.synchronize()
        held.append(counters.memory_statistics(rank)["beside_programs"] // MIB)

    try:
        after(lambda: None)
        after(lambda: dist.all_reduce(tensor))
        after(lambda: dist.all_reduce(tensor))
        after(lambda: dist.all_reduce(tensor, group=others[0]))
        after(lambda: dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0))
        others.clear()
        dist.all_reduce(tensor)  # what was sent has been received
        torch.npu.synchronize()
        after(dist.destroy_process_group)
    except RuntimeError as error:
        return {"held": held, "error": str(error)}
    return {"held": held}


def names() -> list[str]:
    """Return the names of communicators that were created one after the other."""
    rank = int(sys.argv[3])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", store=dist.FileStore(sys.argv[4], RANKS), rank=rank, world_size=RANKS)
    groups = [dist.group.WORLD, *(dist.new_group([0, 1]) for _ in range(3))]
    for group in groups:
        dist.all_reduce(torch.ones(4, device=f"npu:{rank}"), group=group)
    torch.npu.synchronize()
    return [group._get_backend(torch.device("npu")).get_hccl_comm_name(rank) for group in groups]


def main() -> None:
    result, check = Path(sys.argv[1]), sys.argv[2]
    result.write_text(json.dumps(globals()[check]()))


if __name__ == "__main__":
    main()
