"""Attention operators against a loop over tokens and heads in float64."""

import pytest
import torch
import torch_npu
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor
from torch.nn import functional

from tests.npu_emulator.device_process import DeviceProcess
from tests.npu_emulator.operators.compare import assert_like_reference

SCALE = 0.3


def naive(query: Tensor, key: Tensor, value: Tensor, visible) -> tuple[Tensor, Tensor]:
    """One sequence [tokens, heads, size]: output and log-sum-exp; `visible(i, j)` says whether query i sees key j."""
    query, key, value = (states.double() for states in (query, key, value))
    shared = query.shape[1] // key.shape[1]
    out = torch.zeros(query.shape[0], query.shape[1], value.shape[-1], dtype=torch.float64)
    lse = torch.full((query.shape[1], query.shape[0]), float("-inf"), dtype=torch.float64)
    for i in range(query.shape[0]):
        seen = [j for j in range(key.shape[0]) if visible(i, j)]
        for head in range(query.shape[1]):
            if seen:
                scores = key[seen, head // shared] @ query[i, head] * SCALE
                out[i, head] = scores.softmax(0) @ value[seen, head // shared]
                lse[head, i] = scores.logsumexp(0)
    return out, lse


def sequences(lengths, heads, size, seed):
    torch.manual_seed(seed)
    return [torch.randn(length, heads, size) for length in lengths]


def paged(states: list[Tensor], block_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """A cache [blocks, block size, heads, size] that holds the sequences in random blocks, and their block table."""
    needed = [-(-state.shape[0] // block_size) for state in states]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    cache = torch.full((len(order), block_size, *states[0].shape[1:]), 99.0)
    table = torch.zeros(len(states), max([*needed, 1]) + 1, dtype=torch.int32)
    for row, (state, blocks) in enumerate(zip(states, needed, strict=True)):
        for column in range(blocks):
            block = order.pop()
            part = state[column * block_size : (column + 1) * block_size]
            cache[block, : part.shape[0]] = part
            table[row, column] = block
    return cache.to("npu"), table.to("npu")


def close(got: Tensor, expected: Tensor):
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def hidden(queries: int, keys: int) -> Tensor:
    """Return a mask with ones for the keys that the last `queries` of `keys` tokens must not see."""
    return torch.ones(queries, keys).triu(keys - queries + 1)


LENGTHS = some.lists(some.integers(1, 9), min_size=1, max_size=5)


@settings(max_examples=25)
@given(LENGTHS, some.sampled_from([(4, 4), (4, 2), (3, 1)]), some.integers(0, 5))
def test_flash_attention_of_packed_sequences(lengths, heads, seed):
    query, key, value = (
        sequences(lengths, count, 6, seed + i) for i, count in enumerate((heads[0], heads[1], heads[1]))
    )
    packed = [torch.cat(states).to("npu") for states in (query, key, value)]
    out = torch.full_like(packed[0], 7.0)
    mask, lens = hidden(max(lengths), max(lengths)).to("npu"), torch.tensor(lengths, dtype=torch.int32)
    torch_npu._npu_flash_attention(*packed, mask=mask, seq_len=lens, scale_value=SCALE, num_heads=heads[0],
                                   num_kv_heads=heads[1], out=out)  # fmt: skip
    expected = [naive(q, k, v, lambda i, j: j <= i)[0] for q, k, v in zip(query, key, value, strict=True)]
    close(out, torch.cat(expected))
    torch_npu._npu_flash_attention_unpad(*packed, seq_len=lens, scale_value=SCALE, num_heads=heads[0],
                                         num_kv_heads=heads[1], out=out)  # fmt: skip
    expected = [naive(q, k, v, lambda i, j: True)[0] for q, k, v in zip(query, key, value, strict=True)]
    close(out, torch.cat(expected))


def test_rows_past_the_last_sequence_are_left_alone():
    states = [torch.randn(6, 2, 4, device="npu") for _ in range(3)]
    out = torch.full((6, 2, 4), 7.0, device="npu")
    mask, lengths = hidden(4, 4).to("npu"), torch.tensor([4], dtype=torch.int32)
    torch_npu._npu_flash_attention(*states, mask, lengths, SCALE, 2, 2, out)
    assert (out[4:] == 7).all() and not (out[:4] == 7).any()


@settings(max_examples=25)
@given(LENGTHS, some.data(), some.integers(0, 5))
def test_attention_to_a_paged_cache(contexts, data, seed):
    new = [data.draw(some.integers(1, length)) for length in contexts]
    query, key, value = (
        sequences(new, 4, 6, seed),
        sequences(contexts, 2, 6, seed + 1),
        sequences(contexts, 2, 5, seed + 2),
    )
    (keys, table), (values, _) = paged(key, 4, seed), paged(value, 4, seed)
    arguments = dict(num_kv_heads=2, num_heads=4, scale_value=SCALE, block_table=table)
    expected = torch.cat([
        naive(q, k, v, lambda i, j, offset=k.shape[0] - q.shape[0]: j <= i + offset)[0]
        for q, k, v in zip(query, key, value, strict=True)
    ])  # fmt: skip
    packed = torch.cat(query).to("npu")
    rows = [hidden(*sizes) for sizes in zip(new, contexts, strict=True)]
    mask = torch.cat([functional.pad(row, (0, max(contexts) - row.shape[1])) for row in rows]).to("npu")
    lengths, queries = torch.tensor(contexts, dtype=torch.int32), torch.tensor(new, dtype=torch.int32)
    for operator in (torch_npu._npu_paged_attention_splitfuse, torch_npu._npu_flash_attention_qlens):
        out = torch.empty(sum(new), 4, 5, device="npu")
        operator(query=packed, key_cache=keys, value_cache=values, mask=mask, seq_len=queries, context_lens=lengths,
                 out=out, **arguments)  # fmt: skip
        close(out, expected)
    last = torch.tensor(new).cumsum(0) - 1
    out = torch.empty(len(new), 4, 5, device="npu")
    torch_npu._npu_paged_attention(query=packed[last.to("npu")], key_cache=keys, value_cache=values,
                                   context_lens=lengths, out=out, **arguments)  # fmt: skip
    close(out, expected[last])


@settings(max_examples=20)
@given(LENGTHS, some.integers(0, 5))
def test_latent_attention_is_attention_to_latent_and_rope_side_by_side(contexts, seed):
    latent, rope = sequences(contexts, 1, 8, seed), sequences(contexts, 1, 4, seed + 1)
    (latents, table), (ropes, _) = paged(latent, 4, seed), paged(rope, 4, seed)
    nope, turned = torch.randn(len(contexts), 3, 8), torch.randn(len(contexts), 3, 4)
    query = torch.cat([nope, turned], -1)
    expected = torch.cat([
        naive(query[i : i + 1], torch.cat([c, r], -1), c, lambda i, j: True)[0]
        for i, (c, r) in enumerate(zip(latent, rope, strict=True))
    ])  # fmt: skip
    lengths = torch.tensor(contexts, dtype=torch.int32)
    got = torch_npu.atb.npu_multi_head_latent_attention(
        nope.to("npu"), turned.to("npu"), latents, ropes, table, lengths, 3, SCALE, 1
    )
    close(got, expected)
    out = torch.empty(len(contexts), 3, 8, device="npu")
    torch_npu._npu_paged_attention_mla(
        query.to("npu"), torch.cat([latents, ropes], -1), 1, 3, SCALE, table, lengths, 8, out
    )
    close(out, expected)


@settings(max_examples=20)
@given(LENGTHS, some.data(), some.integers(0, 5))
def test_ring_attention_merges_parts(lengths, data, seed):
    """Causal attention to own keys, then to earlier keys, equals attention to all of them."""
    earlier = [data.draw(some.integers(0, 6)) for _ in lengths]
    query = sequences(lengths, 2, 12, seed)
    key, value = sequences(lengths, 2, 12, seed + 1), sequences(lengths, 2, 5, seed + 2)
    old_key, old_value = sequences(earlier, 2, 12, seed + 3), sequences(earlier, 2, 5, seed + 4)
    out = torch.empty(sum(lengths), 2, 5, device="npu")
    lse = torch.empty(2, sum(lengths), device="npu")

    def run(keys, values, seqlen, mask_type, calc_type, before):
        q, k, v = (torch.cat(states).to("npu") for states in (query, keys, values))
        torch_npu.atb.npu_ring_mla(
            q_nope=q[..., :8], q_rope=q[..., 8:], k_nope=k[..., :8], k_rope=k[..., 8:], value=v, mask=out,
            seqlen=seqlen, head_num=2, kv_head_num=2, pre_out=before and out, prev_lse=before and lse, qk_scale=SCALE,
            kernel_type="kernel_type_high_precision", mask_type=mask_type, input_layout="type_bsnd",
            calc_type=calc_type, output=out, softmax_lse=lse,
        )  # fmt: skip

    run(key, value, torch.tensor(lengths, dtype=torch.int32), "mask_type_triu", "calc_type_first_ring", None)
    own = [naive(q, k, v, lambda i, j: j <= i) for q, k, v in zip(query, key, value, strict=True)]
    close(out, torch.cat([o for o, _ in own]))
    close(lse, torch.cat([part for _, part in own], 1))
    run(old_key, old_value, torch.tensor([lengths, earlier], dtype=torch.int32), "no_mask", "calc_type_default", True)
    whole = [
        naive(q, torch.cat([ok, k]), torch.cat([ov, v]), lambda i, j, n=ok.shape[0]: j <= i + n)
        for q, k, v, ok, ov in zip(query, key, value, old_key, old_value, strict=True)
    ]
    close(out, torch.cat([o for o, _ in whole]))
    close(lse, torch.cat([part for _, part in whole], 1))


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@pytest.mark.parametrize("sparse_mode", [0, 2, 3, 4])
def test_fusion_attention_in_every_layout(layout, sparse_mode):
    batch, heads, queries, keys, size = 2, 4, 5, 7, 6
    visible = {
        0: lambda i, j: (i + j) % 3 != 0 and i - 3 <= j <= i + 1,
        2: lambda i, j: j <= i,
        3: lambda i, j: j <= i + keys - queries,
        4: lambda i, j: i + keys - queries - 3 <= j <= i + keys - queries + 1,
    }[sparse_mode]
    hidden = torch.tensor([[not visible(i, j) for j in range(keys)] for i in range(queries)])
    kv_heads = 2 if layout in ("BNSD", "BSND", "BSH") else 4

    def to_layout(states):
        if layout == "BNSD":
            return states
        if layout == "BSND":
            return states.transpose(1, 2)
        if layout == "BSH":
            return states.transpose(1, 2).flatten(2)
        return states.permute(2, 0, 1, 3).flatten(2)

    def operator(q, k, v):
        mask = (torch.ones(2048, 2048, dtype=torch.bool).triu(1) if sparse_mode else hidden).to("npu")
        return torch_npu.npu_fusion_attention(
            *map(to_layout, (q, k, v)), heads, layout, atten_mask=mask, scale=SCALE, sparse_mode=sparse_mode,
            pre_tockens=3, next_tockens=1,
        )[0]  # fmt: skip

    def reference(q, k, v):
        k, v = (states.repeat_interleave(heads // kv_heads, 1) for states in (k, v))
        scores = (q @ k.transpose(-1, -2) * SCALE).masked_fill(hidden, float("-inf"))
        return to_layout(scores.softmax(-1).nan_to_num() @ v)

    torch.manual_seed(0)
    inputs = [
        torch.randn(batch, count, length, size)
        for count, length in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    ]
    assert_like_reference(operator, reference, inputs)


@pytest.mark.parametrize("sparse_mode", [0, 1, 2, 3, 4])
def test_no_sparse_mode_has_an_effect_without_a_mask(sparse_mode):
    def operator(q, k, v):
        return torch_npu.npu_fusion_attention(
            q, k, v, 2, "BNSD", scale=SCALE, sparse_mode=sparse_mode, pre_tockens=1, next_tockens=0
        )[0]  # fmt: skip

    torch.manual_seed(0)
    whole = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    assert_like_reference(operator, lambda q, k, v: (q @ k.mT * SCALE).softmax(-1) @ v, whole)


@settings(max_examples=15)
@given(LENGTHS, some.sampled_from([0, 3, 4]), some.integers(0, 5))
def test_fusion_attention_of_packed_sequences(lengths, sparse_mode, seed):
    torch.manual_seed(seed)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    mask = torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu(1)

    def operator(q, k, v):
        return torch_npu.npu_fusion_attention(
            q, k, v, 4, "TND", atten_mask=mask if sparse_mode else None, scale=SCALE, actual_seq_qlen=ends,
            actual_seq_kvlen=ends, sparse_mode=sparse_mode, pre_tockens=2, next_tockens=1,
        )[0]  # fmt: skip

    def reference(q, k, v):
        outputs = []
        for start, stop in zip([0, *ends[:-1]], ends, strict=True):
            one, other, third = (states[start:stop].transpose(0, 1) for states in (q, k, v))
            scores = one @ other.repeat_interleave(2, 0).transpose(-1, -2) * SCALE
            later = torch.arange(stop - start) - torch.arange(stop - start).unsqueeze(-1)
            hidden = {0: later > 9, 3: later > 0, 4: (later > 1) | (later < -2)}[sparse_mode]
            scores = scores.masked_fill(hidden, float("-inf"))
            outputs.append((scores.softmax(-1) @ third.repeat_interleave(2, 0)).transpose(0, 1))
        return torch.cat(outputs)

    tokens = sum(lengths)
    assert_like_reference(
        operator, reference, [torch.randn(tokens, 4, 6), torch.randn(tokens, 2, 6), torch.randn(tokens, 2, 6)]
    )


def test_fusion_attention_reports_softmax_statistics():
    q = torch.randn(1, 2, 4, 8)
    on_npu = q.to("npu")
    _, largest, total, *_ = torch_npu.npu_fusion_attention(on_npu, on_npu, on_npu, 2, "BNSD", scale=SCALE)
    scores = (q @ q.transpose(-1, -2)) * SCALE
    assert largest.shape == total.shape == (1, 2, 4, 8)
    torch.testing.assert_close((largest[..., 0] + total[..., 0].log()).cpu(), scores.logsumexp(-1))


def test_statistics_of_packed_sequences_have_heads_first():
    """Expect each sequence as [heads, tokens, 8] (NTD), as ring attention reads it, though the shape says TND."""
    torch.manual_seed(0)
    q, ends = torch.randn(5, 2, 6), [2, 5]
    on_npu = q.to("npu")
    _, largest, total, *_ = torch_npu.npu_fusion_attention(
        on_npu, on_npu, on_npu, 2, "TND", scale=SCALE, actual_seq_qlen=ends, actual_seq_kvlen=ends
    )
    assert largest.shape == total.shape == (5, 2, 8)
    found = (largest[..., 0] + total[..., 0].log()).cpu().flatten()
    parts = [q[:2].transpose(0, 1), q[2:].transpose(0, 1)]
    expected = torch.cat([(part @ part.mT * SCALE).logsumexp(-1).flatten() for part in parts])
    torch.testing.assert_close(found, expected)


SHAPE = (2, 4, 5, 8)  # batch, heads, tokens of queries, and of keys
ENDS, KEY_ENDS = [3, 5], [4, 8]  # of two packed sequences


def with_dropout(q, k, v, layout, kept):
    """Attention with dropout; the seed determines the mask, so it is the same each time."""
    torch.npu.manual_seed(3)
    ends = {"actual_seq_qlen": ENDS, "actual_seq_kvlen": KEY_ENDS} if layout == "TND" else {}
    return torch_npu.npu_fusion_attention(q, k, v, q.shape[1], layout, scale=SCALE, keep_prob=kept, **ends)[0]


def weights_of(q, k, layout):
    """[batch, heads, queries, keys]; of packed sequences those of the others are zero."""
    if layout != "TND":
        return (q @ k.mT * SCALE).softmax(-1)
    hidden = torch.ones(ENDS[-1], KEY_ENDS[-1], dtype=torch.bool)
    for start, stop, first, last in zip([0, *ENDS], ENDS, [0, *KEY_ENDS], KEY_ENDS, strict=False):
        hidden[start:stop, first:last] = False
    scores = q.transpose(0, 1) @ k.transpose(0, 1).mT * SCALE
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)


@pytest.mark.parametrize("layout", ["BNSD", "TND"])
@pytest.mark.parametrize("kept", [0.6, 0.9])
def test_weights_that_dropout_leaves_are_made_larger_and_the_same_in_the_gradient(layout, kept):
    """If values are unit rows, the output is the weights themselves, and shows which are left."""
    batch, heads, queries, keys = SHAPE
    shapes = (
        [(queries, heads, keys), (keys, heads, keys)]
        if layout == "TND"
        else [(*SHAPE[:3], keys), (batch, heads, keys, keys)]
    )
    q, k, v = torch.randn(shapes[0]), torch.randn(shapes[1]), torch.randn(shapes[1])
    ones = torch.eye(keys).unsqueeze(1).expand(shapes[1]) if layout == "TND" else torch.eye(keys).expand(shapes[1])
    shown = with_dropout(q.to("npu"), k.to("npu"), ones.contiguous().to("npu"), layout, kept).cpu()
    shown = shown.transpose(0, 1) if layout == "TND" else shown
    weights = weights_of(q, k, layout)
    left = shown != 0
    torch.testing.assert_close(shown, left * weights / kept)
    possible = weights != 0
    assert abs(left[possible].float().mean() - kept) < 0.2

    def reference(q, k, v):
        values = v.transpose(0, 1) if layout == "TND" else v
        out = (weights_of(q, k, layout) * left / kept) @ values
        return out.transpose(0, 1) if layout == "TND" else out

    assert_like_reference(lambda q, k, v: with_dropout(q, k, v, layout, kept), reference, [q, k, v])


def attend(_: dict, options: dict) -> None:
    q = torch.randn(1, 2, 4, 8, device="npu")
    torch_npu.npu_fusion_attention(q, q, q, 2, **{"input_layout": "BNSD"} | options)


def test_fusion_attention_names_unsupported_arguments():
    """In a process without a queue: on a stream without one, torch_npu forgets what it records for another stream."""
    with DeviceProcess(TASK_QUEUE_ENABLE="0") as process:
        process(attend, {})
        for words, options in {
            "prefix is not emulated": {"prefix": [1]},
            "sparse_mode 6 is not emulated": {"sparse_mode": 6},
            "input_layout": {"input_layout": "NBSD"},
        }.items():
            with pytest.raises(RuntimeError, match=words):
                process(attend, options)


def test_cache_stores_and_loads_by_slot():
    cache, values = torch.zeros(3, 4, 2, 5, device="npu"), torch.zeros(3, 4, 2, 3, device="npu")
    key, value = torch.randn(4, 2, 5, device="npu"), torch.randn(4, 2, 3, device="npu")
    slots = torch.tensor([9, -1, 0, 5], dtype=torch.int32, device="npu")
    torch_npu._npu_reshape_and_cache(key, value, cache, values, slots)
    for token, slot in ((0, 9), (2, 0), (3, 5)):
        assert torch.equal(cache.view(12, 2, 5)[slot], key[token]) and torch.equal(
            values.view(12, 2, 3)[slot], value[token]
        )
    assert int((cache != 0).any(-1).any(-1).sum()) == 3
    table = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32, device="npu")
    loaded, loaded_values = torch.empty(5, 2, 5, device="npu"), torch.empty(5, 2, 3, device="npu")
    torch_npu.atb.npu_paged_cache_load(
        cache, values, table, torch.tensor([3, 2]), seq_starts=torch.tensor([1, 0]), key=loaded, value=loaded_values
    )
    expected = [cache[2, 1], cache[2, 2], cache[2, 3], cache[1, 0], cache[1, 1]]
    assert torch.equal(loaded, torch.stack(expected))
