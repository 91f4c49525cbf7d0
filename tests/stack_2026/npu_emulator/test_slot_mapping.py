"""The replacement of vLLM's kernel that maps tokens to slots, against the kernel itself in Triton's interpreter."""

import types

import pytest
import torch
import torch_npu  # noqa: F401
import vllm_ascend.worker.block_table as worker_tables
from vllm.v1.worker import block_table

from npu_emulator.slot_mapping import MappedAtOnce, replace

PAD, ROOM = -1, 48
KERNEL = block_table._compute_slot_mapping_kernel


def slots_of(kernel, counts, ranks=1, rank=0, interleaved=1, block_size=16, free=3):
    """Return the slots of a batch with `counts` tokens per request, each request starting at a random position."""
    generator = torch.Generator().manual_seed(len(counts))
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    first = torch.randint(0, 60, (len(counts),), generator=generator).tolist()
    positions = torch.cat([begin + torch.arange(count) for begin, count in zip(first, counts, strict=True)])
    rows = torch.randperm((len(counts) + free) * 8, generator=generator).view(-1, 8).int()
    slots = torch.full((ROOM,), 7777, device="npu")
    kernel[(len(counts) + 1,)](
        int(starts[-1]), ROOM - 2, starts.npu(), positions.npu(), rows.npu(), rows.stride(0), block_size, slots,
        TOTAL_CP_WORLD_SIZE=ranks, TOTAL_CP_RANK=rank, CP_KV_CACHE_INTERLEAVE_SIZE=interleaved, PAD_ID=PAD,
        BLOCK_SIZE=8,
    )  # fmt: skip
    return slots.tolist()


@pytest.mark.parametrize("counts", [[5, 1, 9], [1] * 7, [20], [3, 0, 11]], ids=str)
@pytest.mark.parametrize(
    "shared",
    [{}, {"ranks": 2, "rank": 1}, {"ranks": 2, "rank": 0, "interleaved": 4}, {"ranks": 2, "interleaved": 3}],
    ids=str,
)
def test_slots_are_those_of_the_kernel(counts, shared):
    found, expected = slots_of(KERNEL, counts, **shared), slots_of(KERNEL.interpreted(), counts, **shared)
    assert found == expected
    assert PAD in found and found[-1] == 7777 and max(found[: sum(counts)]) > PAD


def test_batch_without_tokens_is_all_padding():
    assert slots_of(KERNEL, [0]) == [PAD] * (ROOM - 2) + [7777] * 2


def test_vllm_ascend_launches_the_replacement():
    assert isinstance(worker_tables._compute_slot_mapping_kernel, MappedAtOnce)


def test_kernel_with_other_parameters_is_left_alone():
    other = types.SimpleNamespace(__wrapped__=lambda num_tokens, other_ptr: None)
    module = types.SimpleNamespace(_compute_slot_mapping_kernel=other)
    replace(module)
    assert module._compute_slot_mapping_kernel is other
