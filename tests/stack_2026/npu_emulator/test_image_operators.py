"""Operators that vision-language models call on torch_npu 2.10, against transformers' functions and plain torch."""

from __future__ import annotations

import pytest
import torch
import torch_npu
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_multimodal_rotary_pos_emb
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding, apply_rotary_pos_emb

TOKENS, HEADS, POSITIONS = 9, 3, 32


def drawn(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turned(query: torch.Tensor, angles: torch.Tensor, section: list[int], mode: str) -> torch.Tensor:
    """Rotate heads [1, heads, tokens, size] by angles [3, 1, tokens, size / 2] with transformers' functions."""
    if mode == "interleave":
        kept = Qwen3VLTextRotaryEmbedding.apply_interleaved_mrope(None, angles.clone(), section)
        double = torch.cat([kept, kept], -1)
        return apply_rotary_pos_emb(query, query, double.cos(), double.sin())[0]
    double = torch.cat([angles, angles], -1)
    return apply_multimodal_rotary_pos_emb(query, query, double.cos(), double.sin(), section)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("section", "mode"), [([16, 24, 24], "default"), ([24, 20, 20], "interleave")])
def test_positions_of_three_parts_turn_as_in_transformers(section, mode, dtype):
    size = 2 * sum(section)
    frequencies = 10000.0 ** -(torch.arange(size // 2) / (size // 2)).double()
    rows = torch.arange(POSITIONS).double().unsqueeze(1) * frequencies
    table = torch.cat([rows.cos(), rows.sin()], -1).to(dtype)
    positions = torch.randint(POSITIONS, (3, TOKENS), generator=torch.Generator().manual_seed(1))
    query, key = drawn(TOKENS, HEADS * size, dtype=dtype), drawn(TOKENS, size, dtype=dtype, seed=2)
    found = torch_npu.npu_mrope(
        positions.npu(), query.npu(), key.npu(), table.npu(), size, mrope_section=section, rotary_mode="half",
        cache_mode=mode,
    )  # fmt: skip
    angles = rows[positions].unsqueeze(1)
    small = 1e-5 if dtype == torch.float32 else 0.05
    for given, out in zip((query, key), found, strict=True):
        heads = given.double().view(1, TOKENS, -1, size).transpose(1, 2)
        expected = turned(heads, angles, section, mode).transpose(1, 2).reshape(given.shape)
        torch.testing.assert_close(out.cpu().double(), expected, atol=small, rtol=small)
        # The control: all three parts at the temporal positions.
        text = turned(heads, rows[positions[:1]].expand(3, -1, -1).unsqueeze(1), section, mode)
        assert (out.cpu().double() - text.transpose(1, 2).reshape(given.shape)).abs().max() > 10 * small


@pytest.mark.parametrize("wanted", ["weight", "input", "both"])
def test_patches_of_images_are_convolved_and_their_gradients(wanted):
    """A vision tower's patches do not overlap. torch_npu passes no tensor for a gradient that is not needed."""
    patches, weight = drawn(5, 3, 2, 14, 14), drawn(8, 3, 2, 14, 14, seed=1)
    gradient = drawn(5, 8, 1, 1, 1, seed=2)
    results = []
    for convert in (torch.Tensor.npu, torch.Tensor.double):
        given = [convert(tensor).requires_grad_(wanted in (name, "both"))
                 for name, tensor in (("input", patches), ("weight", weight))]  # fmt: skip
        out = torch.nn.functional.conv3d(*given, stride=(2, 14, 14))
        out.backward(convert(gradient))
        results.append([out.detach(), *(tensor.grad for tensor in given)])
    for found, expected in zip(*results, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found.cpu().double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_banned_tokens_are_filled(dtype):
    """verl bans image placeholder tokens with `index_fill`."""
    scores, banned = drawn(4, 16, dtype=dtype), torch.tensor([7, 3])
    on_device = scores.npu()
    out = on_device.index_fill(-1, banned.npu(), float("-inf"))
    on_device.index_fill_(-1, banned.npu(), float("-inf"))
    expected = scores.index_fill(-1, banned, float("-inf"))
    assert torch.equal(out.cpu(), expected) and torch.equal(on_device.cpu(), expected)
