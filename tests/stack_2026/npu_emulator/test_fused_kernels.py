"""Replacements of vLLM-Ascend's Triton kernels, against the kernel in Triton's interpreter and plain torch."""

import pytest
import torch
import torch_npu  # noqa: F401
import vllm_ascend.ops
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm_ascend.ops.triton import muls_add

from npu_emulator import fused_kernels


def drawn(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def test_scaled_sum_equals_the_kernel_of_triton():
    x, y, out = drawn(3, 40).npu(), drawn(3, 40, seed=1).npu(), torch.empty(3, 40, device="npu")
    muls_add.muls_add_kernel[(2,)](x, y, out, 2.5, x.numel(), 4, BLOCK_SIZE=32)
    assert muls_add.muls_add_triton is fused_kernels.muls_add
    torch.testing.assert_close(torch.ops.vllm.muls_add(x, y, 2.5), out)


@pytest.mark.parametrize("rotated", [32, 16], ids=["whole heads", "half of a head"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_heads_are_normalised_and_turned(rotated, has_bias):
    tokens, heads, key_heads, size = 5, 4, 2, 32
    assert vllm_ascend.ops.AscendRotaryEmbedding
    qkv, weights = drawn(tokens, (heads + 2 * key_heads) * size), [drawn(size, seed=seed) for seed in (1, 2)]
    biases = [drawn(size, seed=seed) for seed in (3, 4)] if has_bias else [None, None]
    cache, positions = drawn(64, rotated, seed=5), torch.tensor([3, 0, 63, 7, 7])
    found = torch.ops.vllm.qkv_rmsnorm_rope(
        qkv.npu(), cache.npu(), positions.npu(), *(weight.npu() for weight in weights), heads * size, key_heads * size,
        size, 1e-6, *(None if bias is None else bias.npu() for bias in biases),
    )  # fmt: skip
    parts = qkv.double().split([heads * size, key_heads * size, key_heads * size], dim=-1)
    for result, part, weight, bias in zip(found[:2], parts, weights, biases, strict=False):
        expected = torch.empty(tokens, part.shape[1] // size, size, dtype=torch.float64)
        for token, head in torch.cartesian_prod(torch.arange(tokens), torch.arange(expected.shape[1])):
            x = part[token].view(-1, size)[head]
            x = x / (x.square().mean() + 1e-6).sqrt() * weight + (0 if bias is None else bias)
            cosine, sine = cache[positions[token]].double().chunk(2)
            expected[token, head] = x
            for index in range(rotated // 2):
                a, b = x[index], x[index + rotated // 2]
                expected[token, head, index] = a * cosine[index] - b * sine[index]
                expected[token, head, index + rotated // 2] = b * cosine[index] + a * sine[index]
        torch.testing.assert_close(result.cpu().double(), expected.flatten(1), atol=1e-5, rtol=1e-5)
    assert torch.equal(found[2].cpu().double(), parts[2])


def test_traced_heads_have_the_shapes_of_the_results():
    tokens, size = 5, 32
    given = [drawn(tokens, 8 * size), drawn(64, size), torch.zeros(tokens, dtype=torch.long), drawn(size), drawn(size)]
    given = [tensor.npu() for tensor in given]
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(tensor) for tensor in given]
        found = torch.ops.vllm.qkv_rmsnorm_rope(*given, 4 * size, 2 * size, head_dim=size, eps=1e-6)
    assert [tuple(part.shape) for part in found] == [(tokens, 4 * size), (tokens, 2 * size), (tokens, 2 * size)]
