"""The gradient of attention as an operator, against autograd of plain attention in float64."""

import pytest
import torch
import torch_npu
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.npu_emulator.device_process import DeviceProcess

SCALE = 0.3
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
LAYOUTS = {
    "BNSD": lambda states: states,
    "BSND": lambda states: states.transpose(1, 2),
    "BSH": lambda states: states.transpose(1, 2).flatten(2),
    "SBH": lambda states: states.permute(2, 0, 1, 3).flatten(2),
}


def plain(q, k, v, hidden):
    """Attention [batch, heads, sequence, size] with shared key heads; a query that sees nothing gives zeros."""
    k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], 1) for states in (k, v))
    scores = (q @ k.transpose(-1, -2) * SCALE).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1).nan_to_num() @ v


def expected_gradients(states, weights, hidden):
    leaves = [part.double().requires_grad_() for part in states]
    (plain(*leaves, hidden) * weights.double()).sum().backward()
    return [leaf.grad for leaf in leaves]


def close(got, expected):
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def first_version(q, k, v, dy, heads, layout, saved, **options):
    output, largest, total = saved
    return torch_npu.npu_fusion_attention_grad(
        q, k, v, dy, heads, layout, softmax_max=largest, softmax_sum=total, attention_in=output, scale_value=SCALE,
        **options,
    )  # fmt: skip


def second_version(q, k, v, dy, heads, layout, saved, pre_tockens=65536, next_tockens=65536, **options):
    """The second version also takes rotary parts of queries and keys, and spells tokens differently."""
    output, largest, total = saved
    return torch_npu.npu_fusion_attention_grad_v2(
        q, k, v, dy, heads, layout, softmax_max=largest, softmax_sum=total, attention_in=output, scale_value=SCALE,
        pre_tokens=pre_tockens, next_tokens=next_tockens, **options,
    )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sparse_mode", [0, 2, 3, 4])
@pytest.mark.parametrize("call", [first_version, second_version])
def test_gradients_in_every_layout(layout, sparse_mode, call):
    torch.manual_seed(0)
    queries, keys, kv_heads = 5, 7, 4 if layout == "SBH" else 2
    offset = torch.arange(keys) - torch.arange(queries).unsqueeze(-1)
    outside = (offset > 1) | (offset < -3)
    hidden = {0: (offset % 3 == 0) | outside, 2: offset > 0, 3: offset > 2, 4: (offset > 3) | (offset < -1)}[
        sparse_mode
    ]
    states = torch.randn(2, 4, queries, 6), torch.randn(2, kv_heads, keys, 6), torch.randn(2, kv_heads, keys, 6)
    weights, laid = torch.randn(2, 4, queries, 6), LAYOUTS[layout]
    q, k, v, dy = (laid(part).contiguous().to("npu") for part in (*states, weights))
    options = dict(atten_mask=(TRIANGLE if sparse_mode else hidden).to("npu"), sparse_mode=sparse_mode, pre_tockens=3,
                   next_tockens=1)  # fmt: skip
    saved = torch_npu.npu_fusion_attention(q, k, v, 4, layout, scale=SCALE, **options)[:3]
    found = call(q, k, v, dy, 4, layout, saved, **options)
    assert found[3] is None, "of a position encoding, and there is none"
    for got, wanted in zip(found, expected_gradients(states, weights, hidden), strict=False):
        close(got, laid(wanted))
    wrong = call(q, k, v, dy, 4, layout, (saved[0] + 0.1, *saved[1:]), **options)
    with pytest.raises(AssertionError):
        close(wrong[0], laid(expected_gradients(states, weights, hidden)[0]))


@settings(max_examples=12)
@given(some.lists(some.tuples(some.integers(1, 5), some.integers(0, 4)), min_size=1, max_size=4),
       some.sampled_from([0, 2, 3]), some.sampled_from([first_version, second_version]))  # fmt: skip
def test_gradients_of_packed_sequences(lengths, sparse_mode, call):
    torch.manual_seed(len(lengths))
    new, all_of = [first for first, _ in lengths], [first + more for first, more in lengths]
    ends = dict(actual_seq_qlen=torch.tensor(new).cumsum(0).tolist(),
                actual_seq_kvlen=torch.tensor(all_of).cumsum(0).tolist())  # fmt: skip
    q, dy = torch.randn(sum(new), 4, 6), torch.randn(sum(new), 4, 6)
    k, v = torch.randn(sum(all_of), 2, 6), torch.randn(sum(all_of), 2, 6)
    on_npu = [part.to("npu") for part in (q, k, v, dy)]
    options = ends | dict(atten_mask=TRIANGLE.to("npu") if sparse_mode else None, sparse_mode=sparse_mode)
    saved = torch_npu.npu_fusion_attention(*on_npu[:3], 4, "TND", scale=SCALE, **options)[:3]
    found = call(*on_npu, 4, "TND", saved, **options)
    parts = zip(*(part.split(sizes) for part, sizes in ((q, new), (k, all_of), (v, all_of), (dy, new))), strict=True)
    expected = []
    for *own, weights in parts:
        own = [part.transpose(0, 1).unsqueeze(0) for part in own]
        offset = torch.arange(own[1].shape[2]) - torch.arange(own[0].shape[2]).unsqueeze(-1)
        hidden = {0: offset > 99, 2: offset > 0, 3: offset > own[1].shape[2] - own[0].shape[2]}[sparse_mode]
        of_one = expected_gradients(own, weights.transpose(0, 1).unsqueeze(0), hidden)
        expected.append([part.squeeze(0).transpose(0, 1) for part in of_one])
    for got, wanted in zip(found, zip(*expected, strict=True), strict=False):
        close(got, torch.cat(wanted))


def poison_memory():
    """Fill memory that is free again afterwards, so that what an operator does not write is no zero."""
    for _ in range(4):
        torch.full((1 << 16,), 7.0, device="npu")


@pytest.mark.parametrize(
    ("ends", "key_ends"),
    [([3, 5], [4, 4]), ([3, 3], [4, 7]), ([2, 2, 5], [3, 6, 6]), ([3, 5, 5], [4, 6, 6]), ([3, 5, 0, 0], [4, 6, 0, 0])],
)
@pytest.mark.parametrize("call", [first_version, second_version])
def test_sequences_without_queries_or_keys(ends, key_ends, call):
    """Queries without keys, and keys without queries, have zero outputs and gradients; zeros at the end are none."""
    torch.manual_seed(0)
    tokens, keys = max(ends), max(key_ends)
    q, dy = torch.randn(tokens, 2, 6), torch.randn(tokens, 2, 6)
    k, v = torch.randn(keys, 2, 6), torch.randn(keys, 2, 6)
    options = {"actual_seq_qlen": ends, "actual_seq_kvlen": key_ends}
    on_npu = [part.to("npu") for part in (q, k, v, dy)]
    poison_memory()
    saved = torch_npu.npu_fusion_attention(*on_npu[:3], 2, "TND", scale=SCALE, **options)[:3]
    poison_memory()
    found = call(*on_npu, 2, "TND", saved, **options)
    hidden = torch.ones(tokens, keys, dtype=torch.bool)
    for start, stop, first, last in zip([0, *ends], ends, [0, *key_ends], key_ends, strict=False):
        hidden[start:stop, first:last] = False
    whole = [part.transpose(0, 1).unsqueeze(0) for part in (q, k, v)]
    close(saved[0], plain(*(part.double() for part in whole), hidden).squeeze(0).transpose(0, 1))
    wanted = expected_gradients(whole, dy.transpose(0, 1).unsqueeze(0), hidden)
    for got, of_one in zip(found, wanted, strict=False):
        close(got, of_one.nan_to_num().squeeze(0).transpose(0, 1))


def part_of_attention(q, k, v, mask, sparse_mode):
    return torch_npu.npu_fusion_attention_v2(q, k, v, 4, "SBH", atten_mask=mask, scale=SCALE, sparse_mode=sparse_mode)[
        :3
    ]


def merged(one, other):
    """The attention [sequence, batch, heads * size] to two parts of the keys, and its statistics."""
    largest = torch.maximum(one[1], other[1])
    totals = [part[2] * (part[1] - largest).exp() for part in (one, other)]
    shares = [(total / sum(totals))[..., :1].permute(2, 0, 1, 3) for total in totals]  # [sequence, batch, heads, 1]
    outputs = [part[0].unflatten(-1, (4, 6)) * share for part, share in zip((one, other), shares, strict=True)]
    return sum(outputs).flatten(2), largest, sum(totals)


def test_context_parallelism_merges_parts_and_differentiates_each_with_the_merged_statistics():
    """Ring attention does this: causal attention to its own keys, then all earlier ones, and a gradient for each."""
    torch.manual_seed(0)
    q, old_k, old_v, k, v, dy = (torch.randn(5, 2, 4 * 6) for _ in range(6))
    on_npu = {name: part.to("npu") for name, part in dict(q=q, k=k, v=v, ok=old_k, ov=old_v, dy=dy).items()}
    triangle = TRIANGLE.to("npu")
    own = part_of_attention(on_npu["q"], on_npu["k"], on_npu["v"], triangle, 3)
    earlier = part_of_attention(on_npu["q"], on_npu["ok"], on_npu["ov"], None, 0)
    whole_output = merged(earlier, own)
    arguments = (on_npu["dy"], 4, "SBH", whole_output)
    of_own = second_version(on_npu["q"], on_npu["k"], on_npu["v"], *arguments, atten_mask=triangle, sparse_mode=3)
    of_earlier = second_version(on_npu["q"], on_npu["ok"], on_npu["ov"], *arguments)

    def heads(part):
        return part.unflatten(-1, (4, 6)).permute(1, 2, 0, 3)

    hidden = torch.cat([torch.zeros(5, 5, dtype=torch.bool), torch.ones(5, 5, dtype=torch.bool).triu(1)], 1)
    whole = [heads(q), heads(torch.cat([old_k, k])), heads(torch.cat([old_v, v]))]
    close(heads(whole_output[0]), plain(*(part.double() for part in whole), hidden))
    wanted = expected_gradients(whole, heads(dy), hidden)
    close(heads(of_own[0] + of_earlier[0]), wanted[0])
    for index in (1, 2):
        close(heads(torch.cat([of_earlier[index], of_own[index]])), wanted[index])


def differentiate(_: dict, call, options: dict) -> None:
    q = torch.randn(1, 2, 4, 8, device="npu")
    call(q, q, q, q, 2, "BNSD", torch_npu.npu_fusion_attention(q, q, q, 2, "BNSD")[:3], **options)


@pytest.mark.parametrize("call", [first_version, second_version])
def test_invalid_settings_rejected(call):
    with DeviceProcess(TASK_QUEUE_ENABLE="0") as process:
        process(differentiate, call, {})
        with pytest.raises(RuntimeError, match="aclnnFlashAttentionScoreGrad.*: prefix is not emulated"):
            process(differentiate, call, {"prefix": [1]})
