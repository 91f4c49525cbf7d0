"""Operators that vLLM-Ascend 0.23 and MindSpeed call on torch_npu 2.10, against plain torch in float64."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
import torch_npu
from vllm_ascend.utils import enable_custom_op

KERNELS = torch.ops._C_ascend
CALLS_A_KERNEL = """
import torch, torch_npu
from vllm_ascend.utils import enable_custom_op
enable_custom_op()
x, weight, indices = torch.ones(2, 64).half().npu(), torch.ones(1, 8, 64).half().npu(), torch.zeros(2).long().npu()
torch.ops._C_ascend.bgmv_shrink(x, weight, indices, torch.zeros(2, 8, device="npu"), 1.0)
torch.npu.synchronize()
"""


@pytest.fixture(scope="module", autouse=True)
def compiled_module():
    assert enable_custom_op(), "vllm_ascend_C does not load"


def drawn(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_sum_is_normalised_with_bias(dtype, has_bias):
    first, second = drawn(3, 5, 64, dtype=dtype), drawn(3, 5, 64, dtype=dtype, seed=1)
    weight, bias = drawn(64, dtype=dtype, seed=2), drawn(64, dtype=dtype, seed=3) if has_bias else None
    given = [tensor.npu() if tensor is not None else None for tensor in (first, second, weight, bias)]
    normal, inverse, total = KERNELS.npu_add_rms_norm_bias(*given, 1e-6)
    added = first + second
    root = torch.rsqrt(added.double().square().mean(-1, keepdim=True) + 1e-6)
    expected = added.double() * root * weight.double() + (bias.double() if has_bias else 0)
    assert torch.equal(total.cpu(), added)
    torch.testing.assert_close(normal.cpu(), expected.to(dtype))
    torch.testing.assert_close(inverse.cpu(), root.float())


@pytest.mark.parametrize(
    ("first_expert", "end", "places_kind", "counts_kind"),
    [(0, 8, 0, 1), (0, 8, 1, 0), (2, 6, 0, 1), (2, 6, 1, 2), (7, 8, 0, 0)],
)
def test_tokens_are_routed_to_a_range_of_experts(first_expert, end, places_kind, counts_kind):
    tokens, k = 11, 3
    rows = drawn(tokens, 16)
    experts = torch.stack([drawn(8, seed=row).argsort()[:k] for row in range(tokens)])
    expanded, places, counts, _ = KERNELS.npu_moe_init_routing_custom(
        rows.npu(), experts.int().npu(), scale=None, offset=None, active_num=tokens * k, expert_capacity=-1,
        expert_num=8, drop_pad_mode=0, expert_tokens_num_type=counts_kind, expert_tokens_num_flag=True, quant_mode=-1,
        active_expert_range=[first_expert, end], row_idx_type=places_kind,
    )  # fmt: skip
    copies = sorted(
        (expert, copy) for copy, expert in enumerate(experts.flatten().tolist()) if first_expert <= expert < end
    )
    order = [copy for _, copy in copies]
    assert torch.equal(expanded.cpu()[: len(order)], rows[[copy // k for copy in order]])
    if places_kind == 1:
        assert places.tolist()[: len(order)] == order
    else:
        assert places.tolist() == [order.index(copy) if copy in order else -1 for copy in range(tokens * k)]
    numbers = [sum(expert == each for expert, _ in copies) for each in range(first_expert, end)]
    if counts_kind == 0:
        assert counts.tolist() == list(itertools.accumulate(numbers))
    elif counts_kind == 1:
        assert counts.tolist() == numbers
    else:
        pairs = [[first_expert + index, number] for index, number in enumerate(numbers) if number]
        assert counts.tolist() == pairs + [[0, 0]] * (len(counts) - len(pairs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_multiplied_and_put_last(dtype):
    heads, weights = drawn(4, 6, 32, dtype=dtype), drawn(4, 32, 16, dtype=dtype, seed=1)
    result = torch_npu.npu_transpose_batchmatmul(heads.npu(), weights.npu(), perm_y=(1, 0, 2))
    expected = torch.einsum("hbl,hlv->bhv", heads.double(), weights.double())
    torch.testing.assert_close(result.cpu(), expected.to(dtype))


def test_empty_sequences_of_a_packed_batch_are_passed_over():
    """MindSpeed passes cumulative lengths with the leading 0, which is an empty first sequence."""
    ends, heads, size = [0, 3, 3, 8], 2, 16
    query, key, value = (drawn(8, heads, size, seed=seed).npu().requires_grad_() for seed in range(3))
    mask = torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1).npu()
    out = torch_npu.npu_fusion_attention(
        query, key, value, heads, "TND", atten_mask=mask, scale=size**-0.5, sparse_mode=3,
        actual_seq_qlen=ends, actual_seq_kvlen=ends,
    )[0]  # fmt: skip
    gradient = drawn(8, heads, size, seed=3)
    out.backward(gradient.npu())
    plain = [tensor.detach().cpu().double().requires_grad_() for tensor in (query, key, value)]
    parts = []
    for start, end in [(0, 3), (3, 8)]:
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in plain)
        parts.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
    expected = torch.cat(parts)
    expected.backward(gradient.double())
    torch.testing.assert_close(out.detach().cpu().double(), expected.detach(), atol=1e-5, rtol=1e-5)
    for tensor, reference in zip((query, key, value), plain, strict=True):
        torch.testing.assert_close(tensor.grad.cpu().double(), reference.grad, atol=1e-5, rtol=1e-5)


def packed_statistics(values: torch.Tensor, ends: list[int], layout: str) -> torch.Tensor:
    """Return statistics [tokens, heads] as the kernels keep them, [tokens, heads, 8], in a layout's order."""
    if layout != "TND":
        parts = [values[start:end].t().flatten() for start, end in itertools.pairwise(ends)]
        values = torch.cat(parts).view_as(values)
    return values.unsqueeze(-1).expand(-1, -1, 8).contiguous().npu()


@pytest.mark.parametrize("layout", ["", "SBH", "TND"])
def test_attention_over_two_parts_of_the_keys_is_merged(layout):
    """Merge packed sequences of 3 and 5 queries. Statistics lie by heads first, unless the layout is TND."""
    heads, size, ends = 2, 64, [0, 3, 8]
    scores, values = drawn(8, heads, 12), drawn(heads, 12, size, seed=1)
    given = []
    for keys in (slice(0, 5), slice(5, 12)):
        part = scores[:, :, keys]
        most, result = part.amax(-1), torch.einsum("thk,hkd->thd", part.softmax(-1), values[:, keys])
        sums = (part - most.unsqueeze(-1)).exp().sum(-1)
        given += [result.npu(), *(packed_statistics(each, ends, layout) for each in (most, sums))]
    merged, most, sums = torch_npu.npu_ring_attention_update(
        *given, actual_seq_qlen=torch.tensor(ends).npu(), input_layout="TND", input_softmax_layout=layout
    )
    expected = torch.einsum("thk,hkd->thd", scores.double().softmax(-1), values.double())
    torch.testing.assert_close(merged.cpu().double(), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(most.cpu(), packed_statistics(scores.amax(-1), ends, layout).cpu())
    total = packed_statistics((scores - scores.amax(-1, keepdim=True)).exp().sum(-1), ends, layout)
    torch.testing.assert_close(sums.cpu(), total.cpu())


def test_kernel_that_is_not_emulated_is_named():
    """Use a separate process, as its operator queue does not continue after the error."""
    ended = subprocess.run([sys.executable, "-c", CALLS_A_KERNEL], capture_output=True, text=True)
    assert ended.returncode == 1 and "vllm_ascend_C's bgmv_shrink is not emulated" in ended.stderr


@pytest.mark.parametrize("wants_sum", [0, 1])
def test_parts_of_attention_are_merged_by_their_sums(wants_sum):
    """A part without keys has the sum +inf, as fused attention returns it, and gets no weight."""
    scores, values = drawn(6, 30), drawn(30, 16, seed=1)
    parts = [(scores[:, keys], values[keys]) for keys in (slice(0, 10), slice(10, 14), slice(14, 30))]
    sums = [part.double().logsumexp(-1).float() for part, _ in parts]
    outs = [part.softmax(-1) @ value for part, value in parts]
    sums[1][2:4], outs[1][2:4] = float("inf"), 0
    merged, total = torch_npu.npu_attention_update(
        [each.npu() for each in sums], [out.npu() for out in outs], wants_sum
    )
    hidden = torch.zeros(6, 30, dtype=torch.bool)
    hidden[2:4, 10:14] = True
    seen = scores.double().masked_fill(hidden, float("-inf"))
    torch.testing.assert_close(merged.cpu(), (seen.softmax(-1) @ values.double()).float())
    if wants_sum:
        torch.testing.assert_close(total.cpu(), seen.logsumexp(-1).float())


def test_sum_of_queries_without_keys_is_infinite():
    query, key = drawn(3, 2, 128).npu(), drawn(4, 2, 128, seed=1).npu()
    out, sums = torch_npu.npu_fused_infer_attention_score(
        query, key, key, num_heads=2, num_key_value_heads=2, input_layout="TND", scale=0.1, sparse_mode=0,
        actual_seq_lengths=[1, 3], actual_seq_lengths_kv=[4, 4], softmax_lse_flag=True,
    )  # fmt: skip
    assert sums[0].isfinite().all() and sums[1:].isposinf().all() and not out[1:].any()


@pytest.mark.parametrize(("shape", "has_rows"), [((4,), False), ((4,), True), ((2, 3), False)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_quantised_product_in_strict_mode(monkeypatch, shape, has_rows, scale_dtype):
    """op-plugin passes empty tensors of the scale's type for what the kernel does not use."""
    monkeypatch.setenv("NPU_EMULATOR_STRICT", "1")
    generator = torch.Generator().manual_seed(0)
    rows, weight = (
        torch.randint(-128, 128, size, dtype=torch.int8, generator=generator) for size in ((*shape, 64), (64, 32))
    )
    scale, of_rows = (drawn(32).abs() / 100).to(scale_dtype), drawn(shape[0], seed=1).abs()
    found = torch_npu.npu_quant_matmul(
        rows.npu(), weight.npu(), scale.npu(), pertoken_scale=of_rows.npu() if has_rows else None,
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    expected = rows.double() @ weight.double() * scale.double()
    expected = expected * of_rows.double()[:, None] if has_rows else expected
    torch.testing.assert_close(found.cpu().double(), expected, rtol=2**-7, atol=1e-3)
