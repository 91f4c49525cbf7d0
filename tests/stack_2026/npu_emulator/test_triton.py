"""Triton's interpreter runs vLLM's Triton kernels on tensors of the emulated device."""

import numpy as np
import pytest
import torch
import torch_npu  # noqa: F401
from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker import block_table

from npu_emulator import triton_bridge

BLOCK, LONGEST, PAD = 16, 24, -1
REPLACED = block_table._compute_slot_mapping_kernel
INTERPRETED = triton_bridge.jit(REPLACED.__wrapped__)


def test_vllm_finds_no_device_for_triton():
    assert not HAS_TRITON


@pytest.mark.parametrize("kernel", [INTERPRETED, REPLACED], ids=["interpreted", "replaced"])
def test_tokens_are_mapped_to_slots_as_counted_by_hand(kernel):
    starts, counts = [0, 5, 6], [5, 1, 9]
    blocks = np.arange(3 * 4).reshape(3, 4)[:, ::-1].copy() * 7
    positions = np.concatenate([first + np.arange(count) for first, count in zip((0, 30, 10), counts, strict=True)])
    expected = [PAD] * LONGEST
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for token in range(start, start + count):
            expected[token] = blocks[row, positions[token] // BLOCK] * BLOCK + positions[token] % BLOCK
    slots = torch.zeros(LONGEST, dtype=torch.int64, device="npu")
    kernel[(4,)](
        len(positions), LONGEST, torch.tensor([0, 5, 6, 15], dtype=torch.int32).npu(), torch.tensor(positions).npu(),
        torch.tensor(blocks, dtype=torch.int32).npu(), 4, BLOCK, slots, TOTAL_CP_WORLD_SIZE=1, TOTAL_CP_RANK=0,
        CP_KV_CACHE_INTERLEAVE_SIZE=1, PAD_ID=PAD, BLOCK_SIZE=1024,
    )  # fmt: skip
    assert slots.tolist() == expected


def test_kernel_is_launched_over_a_grid_only():
    with pytest.raises(RuntimeError, match=r"_compute_slot_mapping_kernel\[grid\]"):
        REPLACED()


def test_sampling_of_vllm_ascend_equals_torch():
    """vLLM-Ascend's kernels have blocks of 44032 elements, no power of two, and call Triton's own library."""
    from vllm_ascend.worker.v2.sample.gumbel import apply_temperature, gumbel_sample

    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(5))
    rows, temperatures = torch.arange(3, dtype=torch.int32).npu(), torch.tensor([0.5, 2.0, 0.0])
    scaled = logits.npu()
    apply_temperature(scaled, rows, temperatures.npu())
    assert torch.equal(scaled.cpu()[:2], logits[:2] / temperatures[:2, None])
    assert torch.equal(scaled.cpu()[2], logits[2]), "a temperature of 0 is for the best token"
    seeds, positions = torch.tensor([1, 2, 3]).npu(), torch.tensor([4, 5, 6]).npu()
    greedy = gumbel_sample(logits.npu(), rows, torch.zeros(3).npu(), seeds, positions, apply_temperature=True)
    assert greedy.tolist() == logits.argmax(-1).tolist()
    drawn = gumbel_sample(logits.npu(), rows, torch.full((3,), 50.0).npu(), seeds, positions, apply_temperature=True)
    assert drawn.tolist() != greedy.tolist(), "at a high temperature noise decides"
