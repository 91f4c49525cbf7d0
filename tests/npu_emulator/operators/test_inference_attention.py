"""Attention for inference against a loop over queries and keys in float64."""

import pytest
import torch
import torch_npu
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.npu_emulator.operators.compare import refused
from tests.npu_emulator.operators.test_attention import SCALE, close, naive, paged, sequences

LENGTHS = some.lists(some.tuples(some.integers(1, 5), some.integers(0, 9)), min_size=1, max_size=4)
HEADS = some.sampled_from([(4, 4), (4, 2), (3, 1)])
CAUSAL = {0: lambda q, k: lambda i, j: True, 2: lambda q, k: lambda i, j: j <= i,
          3: lambda q, k: lambda i, j: j <= i + k - q}  # fmt: skip


def padded(states, layout):
    """Sequences [tokens, heads, size] in a batched layout, padded with a number that must not be looked at."""
    longest = max(state.shape[0] for state in states)
    rows = torch.full((len(states), max(longest, 1), *states[0].shape[1:]), 99.0)
    for row, state in zip(rows, states, strict=True):
        row[: state.shape[0]] = state
    return {"BSH": rows.flatten(2), "BSND": rows, "BNSD": rows.transpose(1, 2).contiguous()}[layout].to("npu")


def sequences_of(output, layout, lengths, heads):
    rows = {"BSH": lambda: output.unflatten(-1, (heads, -1)), "BSND": lambda: output,
            "BNSD": lambda: output.transpose(1, 2)}[layout]()  # fmt: skip
    assert all(not row[length:].any() for row, length in zip(rows, lengths, strict=True))
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def running(lengths):
    return torch.tensor(lengths).cumsum(0).tolist()


@settings(max_examples=40)
@given(LENGTHS, HEADS, some.sampled_from(["BSH", "BSND", "BNSD", "TND"]), some.sampled_from([0, 2, 3]),
       some.integers(0, 99))  # fmt: skip
def test_every_layout_and_causal_rule(lengths, heads, layout, sparse_mode, seed):
    new, contexts = (list(column) for column in zip(*lengths, strict=True))
    query, key = sequences(new, heads[0], 6, seed), sequences(contexts, heads[1], 6, seed + 1)
    value = sequences(contexts, heads[1], 5 if layout == "TND" else 6, seed + 2)
    together = (lambda states, _: torch.cat(states).to("npu")) if layout == "TND" else padded
    told = running if layout == "TND" else list
    output, lse = torch_npu.npu_fused_infer_attention_score(
        *(together(states, layout) for states in (query, key, value)), num_heads=heads[0],
        num_key_value_heads=heads[1], input_layout=layout, scale=SCALE, sparse_mode=sparse_mode,
        actual_seq_lengths=told(new), actual_seq_lengths_kv=told(contexts), softmax_lse_flag=True,
    )  # fmt: skip
    found = output.split(new) if layout == "TND" else sequences_of(output, layout, new, heads[0])
    rule = 0 if layout != "TND" and max(new) == 1 else sparse_mode  # one query each: no mode has an effect
    logs = lse.squeeze(-1).split(new) if layout == "TND" else [row.squeeze(-1).t() for row in lse]
    for got, got_lse, q, k, v in zip(found, logs, query, key, value, strict=True):
        expected, expected_lse = naive(q, k, v, CAUSAL[rule](q.shape[0], k.shape[0]))
        close(got, expected)
        # A query that sees no key has the sum inf, and not the -inf of the formula.
        close(got_lse[: q.shape[0]].t(), expected_lse.masked_fill(expected_lse.isneginf(), float("inf")))


def in_nz(cache):
    """A cache [blocks, block size, heads, size] as [blocks, heads, size / 16, block size, 16], element by element."""
    blocks, tokens, heads, size = cache.shape
    out = torch.empty(blocks, heads, size // 16, tokens, 16)
    for head in range(heads):
        for column in range(size):
            out[:, head, column // 16, :, column % 16] = cache[:, :, head, column].cpu()
    return out.to("npu")


PAGES = {
    "rows": lambda cache: cache.flatten(2),
    "heads first": lambda cache: cache.transpose(1, 2).contiguous(),
    "NZ": in_nz,
}


@settings(max_examples=25)
@given(some.lists(some.integers(0, 9), min_size=1, max_size=5), some.sampled_from(sorted(PAGES)), some.integers(0, 99))
def test_decoding_latent_attention_from_pages(contexts, pages, seed):
    """DeepSeek decodes this way: one query each, one head of keys that are also the values, separate rotary parts."""
    latent, rope = sequences(contexts, 1, 32, seed), sequences(contexts, 1, 16, seed + 1)
    (latents, table), (ropes, _) = paged(latent, 4, seed), paged(rope, 4, seed)
    nope, turned = torch.randn(len(contexts), 3, 32), torch.randn(len(contexts), 3, 16)
    layout = "BSND" if pages == "NZ" else "BNSD"
    rows = [part.unsqueeze(1 if layout == "BSND" else 2).to("npu") for part in (nope, turned)]
    output, lse = torch_npu.npu_fused_infer_attention_score(
        rows[0], PAGES[pages](latents), PAGES[pages](latents), query_rope=rows[1], key_rope=PAGES[pages](ropes),
        num_heads=3, num_key_value_heads=1, input_layout=layout, scale=SCALE, block_table=table, block_size=4,
        actual_seq_lengths_kv=contexts,
    )  # fmt: skip
    assert lse.tolist() in ([0.0], [])  # what is not wanted: one zero with torch_npu 2.5.1, nothing with 2.10
    for row, (q, q_rope, k, k_rope) in enumerate(zip(nope, turned, latent, rope, strict=True)):
        query, key = torch.cat([q, q_rope], -1).unsqueeze(0), torch.cat([k, k_rope], -1)
        close(output[row].view(1, 3, 32), naive(query, key, k, lambda i, j: True)[0])


@settings(max_examples=20)
@given(LENGTHS, some.integers(0, 99))
def test_several_new_tokens_from_pages(lengths, seed):
    lengths = [(new, max(new, context)) for new, context in lengths]
    new, contexts = (list(column) for column in zip(*lengths, strict=True))
    query, key, value = sequences(new, 4, 8, seed), sequences(contexts, 2, 8, seed + 1), sequences(contexts, 2, 8, seed)
    (keys, table), (values, _) = paged(key, 4, seed), paged(value, 4, seed)
    output, _ = torch_npu.npu_fused_infer_attention_score(
        torch.cat(query).to("npu"), keys.flatten(2), values.flatten(2), num_heads=4, num_key_value_heads=2,
        input_layout="TND", scale=SCALE, sparse_mode=3, atten_mask=torch.ones(2048, 2048).triu(1).bool().to("npu"),
        actual_seq_lengths=running(new), actual_seq_lengths_kv=contexts, block_table=table, block_size=4,
    )  # fmt: skip
    for got, q, k, v in zip(output.split(new), query, key, value, strict=True):
        close(got, naive(q, k, v, CAUSAL[3](q.shape[0], k.shape[0]))[0])


def test_a_mask_hides_what_it_says():
    states, mask = [torch.randn(2, 2, 5, 8) for _ in range(3)], torch.rand(5, 5) < 0.4
    mask[:, 0] = False
    output, _ = torch_npu.npu_fused_infer_attention_score(
        *(part.to("npu") for part in states), num_heads=2, input_layout="BNSD", scale=SCALE, atten_mask=mask.to("npu")
    )
    for row in range(2):
        q, k, v = (part[row].transpose(0, 1) for part in states)
        close(output[row].transpose(0, 1), naive(q, k, v, lambda i, j: not mask[i, j])[0])
        with pytest.raises(AssertionError):
            close(output[row].transpose(0, 1), naive(q, k, v, lambda i, j: True)[0])


@pytest.mark.parametrize("sparse_mode", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", [(3, 7), (3, 1, 7), (3, 1, 1, 7)])
def test_each_sequence_of_one_query_has_its_row_of_a_mask(shape, sparse_mode):
    """Neither modes nor windows have an effect there."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 1, 8), torch.randn(3, 2, 7, 8), torch.randn(3, 2, 7, 8)
    mask = torch.arange(7) >= torch.tensor([[7], [4], [2]])
    scores = (query.double() @ key.double().mT * SCALE).masked_fill(mask[:, None, None], -torch.inf)
    expected = scores.softmax(-1) @ value.double()
    on_npu = [part.to("npu") for part in (query, key, value)]
    output, lse = torch_npu.npu_fused_infer_attention_score(
        *on_npu, num_heads=2, input_layout="BNSD", scale=SCALE, atten_mask=mask.view(shape).to("npu"),
        sparse_mode=sparse_mode, pre_tokens=0, next_tokens=0, softmax_lse_flag=True,
    )  # fmt: skip
    torch.testing.assert_close(output.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), scores.logsumexp(-1, True), rtol=1e-5, atol=1e-5)
    alone = torch_npu.npu_incre_flash_attention(
        *on_npu, num_heads=2, input_layout="BNSD", scale_value=SCALE, atten_mask=mask.view(shape).to("npu")
    )
    torch.testing.assert_close(alone.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_unsupported_arguments_are_named():
    x, table = torch.randn(1, 1, 2, 8, device="npu"), torch.zeros(1, 1, dtype=torch.int32, device="npu")
    for words, options in {
        "quantisation is not emulated": {"antiquant_scale": x},
        "query_padding_size is not emulated": {"query_padding_size": x},
        "pre_tokens and next_tokens are not emulated": {"pre_tokens": 3, "atten_mask": x[0, 0, :, :2] > 0},
        "sparse_mode 4 is not emulated": {"sparse_mode": 4},
        "input_layout NTD is not emulated|query's dim should be consistent": {"input_layout": "NTD"},  # 2.5.1 | 2.10
        "block_size is 8, and blocks of the cache hold 2 tokens": {
            "block_table": table, "block_size": 8, "actual_seq_lengths_kv": [1],
        },
    }.items():  # fmt: skip
        with refused(words):
            torch_npu.npu_fused_infer_attention_score(x, x, x, **{"input_layout": "BNSD"} | options)


@settings(max_examples=30)
@given(LENGTHS, HEADS, some.sampled_from(["BSH", "BSND", "BNSD"]), some.sampled_from([0, 2, 3]), some.integers(0, 99))
def test_attention_of_whole_prompts(lengths, heads, layout, sparse_mode, seed):
    new, contexts = (list(column) for column in zip(*lengths, strict=True))
    query, key = sequences(new, heads[0], 6, seed), sequences(contexts, heads[1], 6, seed + 1)
    value = sequences(contexts, heads[1], 6, seed + 2)
    output = torch_npu.npu_prompt_flash_attention(
        *(padded(states, layout) for states in (query, key, value)), num_heads=heads[0], input_layout=layout,
        num_key_value_heads=heads[1], scale_value=SCALE, sparse_mode=sparse_mode, actual_seq_lengths=new,
        actual_seq_lengths_kv=contexts, pre_tokens=65536, next_tokens=0,
    )  # fmt: skip
    for got, q, k, v in zip(sequences_of(output, layout, new, heads[0]), query, key, value, strict=True):
        close(got, naive(q, k, v, CAUSAL[sparse_mode](q.shape[0], k.shape[0]))[0])


def test_prompts_without_lengths_see_all_but_what_the_mask_hides():
    q, k, v = (torch.randn(2, 5, 2, 8) for _ in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for given_mask, visible in ((mask.to("npu"), lambda i, j: j <= i), (None, lambda i, j: True)):
        output = torch_npu.npu_prompt_flash_attention(
            *(part.flatten(2).to("npu") for part in (q, k, v)), num_heads=2, scale_value=SCALE, atten_mask=given_mask
        )
        for row in range(2):
            close(output[row].unflatten(-1, (2, 8)), naive(q[row], k[row], v[row], visible)[0])


@settings(max_examples=25)
@given(some.lists(some.integers(1, 9), min_size=1, max_size=4), HEADS, some.sampled_from(["BSH", "BSND", "BNSD"]),
       some.booleans(), some.integers(0, 99))  # fmt: skip
def test_attention_of_one_token_a_sequence(contexts, heads, layout, in_pages, seed):
    query = sequences([1] * len(contexts), heads[0], 6, seed)
    key, value = sequences(contexts, heads[1], 6, seed + 1), sequences(contexts, heads[1], 6, seed + 2)
    if in_pages:
        (keys, table), (values, _) = paged(key, 4, seed), paged(value, 4, seed)
        held = dict(key=keys.flatten(2), value=values.flatten(2), block_table=table, block_size=4)
    else:
        held = dict(key=padded(key, layout), value=padded(value, layout))
    output = torch_npu.npu_incre_flash_attention(
        padded(query, layout), num_heads=heads[0], num_key_value_heads=heads[1], input_layout=layout,
        scale_value=SCALE, actual_seq_lengths=contexts, **held,
    )  # fmt: skip
    for got, q, k, v in zip(
        sequences_of(output, layout, [1] * len(contexts), heads[0]), query, key, value, strict=True
    ):
        close(got, naive(q, k, v, lambda i, j: True)[0])
        if k.shape[0] > 1:
            with pytest.raises(AssertionError):
                close(got, naive(q, k[:-1], v[:-1], lambda i, j: True)[0])


def test_inference_attention_names_unsupported_arguments():
    x = torch.randn(1, 2, 8, device="npu", dtype=torch.bfloat16)
    with refused("aclnnPromptFlashAttentionV3: pse_shift is not emulated"):
        torch_npu.npu_prompt_flash_attention(x, x, x, pse_shift=x)
    with refused("aclnnPromptFlashAttentionV3: sparse_mode 4 is not emulated"):
        torch_npu.npu_prompt_flash_attention(x, x, x, sparse_mode=4)
    with refused("aclnnIncreFlashAttentionV4: quantisation is not emulated"):
        torch_npu.npu_incre_flash_attention(x[:, :1], x, x, antiquant_scale=x)
    with refused("aclnnIncreFlashAttentionV4: a sequence must have one query"):
        torch_npu.npu_incre_flash_attention(x, x, x)
