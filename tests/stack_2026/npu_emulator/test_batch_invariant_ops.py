"""The emulated package `batch_invariant_ops`: a row or query gives the same bits whatever else is in the batch."""

import batch_invariant_ops
import pytest
import torch
import torch_npu
from torch import Tensor

OPERATORS = torch.ops.batch_invariant_ops
TOKENS, HEADS, KEY_HEADS, SIZE, BLOCK = 37, 4, 2, 64, 16
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def drawn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def products(function, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the product of all rows together, and the product of each row by itself."""
    together = function(rows.npu(), weight.npu().t()).cpu()
    alone = torch.cat([function(row.npu()[None], weight.npu().t()).cpu() for row in rows])
    return together, alone


@pytest.mark.parametrize(("inner", "columns"), [(64, 192), (512, 64), (96, 64), (64, 100), (896, 151)])
def test_product_of_a_row_does_not_depend_on_the_others(inner, columns):
    rows, weight = drawn(TOKENS, inner), drawn(columns, inner, seed=1)
    together, alone = products(OPERATORS.npu_mm_batch_invariant, rows, weight)
    assert torch.equal(together, alone)
    torch.testing.assert_close(together.double(), rows.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)
    plain, of_one = products(torch.mm, rows, weight)
    assert not torch.equal(plain, of_one), "the control: on this host torch.mm depends on the number of rows"


@pytest.mark.parametrize(("left", "right"), [((5, 3, 16), (16, 8)), ((5, 3, 16), (5, 16, 8)), ((16,), (16, 8)),
                                             ((3, 16), (16,)), ((2, 1, 3, 16), (5, 16, 8))])  # fmt: skip
def test_matmul_has_the_shapes_of_torch(left, right):
    one, other = drawn(*left), drawn(*right, seed=1)
    found = OPERATORS.npu_matmul_batch_invariant(one.npu(), other.npu()).cpu()
    torch.testing.assert_close(found, torch.matmul(one, other))


def test_sum_of_a_row_does_not_depend_on_the_others():
    rows = drawn(TOKENS, 4097)
    together = OPERATORS.npu_reduce_sum_batch_invariant(rows.npu(), -1, True).cpu()
    alone = torch.cat([OPERATORS.npu_reduce_sum_batch_invariant(row.npu()[None], -1, True).cpu() for row in rows])
    assert torch.equal(together, alone) and together.shape == (TOKENS, 1)


def attend(function, query: Tensor, key: Tensor, value: Tensor, ends: list[int], key_ends: list[int]) -> Tensor:
    return function(
        query.npu(), key.npu(), value.npu(), num_heads=HEADS, num_key_value_heads=KEY_HEADS, scale=SIZE**-0.5,
        input_layout="TND", atten_mask=MASK.npu(), sparse_mode=3, actual_seq_lengths=ends,
        actual_seq_lengths_kv=key_ends,
    )[0].cpu()  # fmt: skip


def attend_to_cache(function, query: Tensor, caches: list[Tensor], blocks: Tensor, seen: int) -> Tensor:
    return function(
        query.npu(), *(each.npu() for each in caches), num_heads=HEADS, num_key_value_heads=KEY_HEADS,
        scale=SIZE**-0.5, input_layout="TND", atten_mask=MASK.npu(), sparse_mode=3,
        actual_seq_lengths=[query.shape[0]], actual_seq_lengths_kv=[seen], block_table=blocks.npu(),
        block_size=BLOCK,
    )[0].cpu()  # fmt: skip


def sequence() -> tuple[Tensor, Tensor, Tensor]:
    return drawn(TOKENS, HEADS, SIZE), drawn(TOKENS, KEY_HEADS, SIZE, seed=1), drawn(TOKENS, KEY_HEADS, SIZE, seed=2)


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads = [each.double().transpose(0, 1).repeat_interleave(HEADS // each.shape[1], 0) for each in (query, key, value)]
    found = torch.nn.functional.scaled_dot_product_attention(*(each[None] for each in heads), is_causal=True)
    return found[0].transpose(0, 1)


def in_blocks(tensor: Tensor) -> Tensor:
    """Arrange a tensor in cache blocks in token order, padded with zeros: [blocks, block size, heads * size]."""
    padded = torch.zeros(-(-TOKENS // BLOCK) * BLOCK, *tensor.shape[1:])
    padded[:TOKENS] = tensor
    return padded.view(-1, BLOCK, KEY_HEADS * SIZE)


def attention_in_parts(function) -> list[Tensor]:
    """Compute the attention of the same tokens whole, behind another sequence, in chunks of 10 and token by token."""
    query, key, value = sequence()
    whole = attend(function, query, key, value, [TOKENS], [TOKENS])
    packed = [torch.cat([drawn(9, *each.shape[1:], seed=5), each]) for each in (query, key, value)]
    behind = attend(function, *packed, [9, 9 + TOKENS], [9, 9 + TOKENS])[9:]
    caches, blocks = [in_blocks(key), in_blocks(value)], torch.arange(3, dtype=torch.int32)[None]
    parts = [
        torch.cat([
            attend_to_cache(function, query[start : start + size], caches, blocks, min(start + size, TOKENS))
            for start in range(0, TOKENS, size)
        ])
        for size in (10, 1)
    ]  # fmt: skip
    return [whole, behind, *parts]


def test_attention_of_a_query_does_not_depend_on_chunks_or_neighbours():
    whole, *others = attention_in_parts(OPERATORS.npu_fused_infer_attention_score_batch_invariant)
    assert all(torch.equal(whole, each) for each in others)
    torch.testing.assert_close(whole.double(), plain_attention(*sequence()), rtol=1e-5, atol=1e-5)
    whole, *others = attention_in_parts(torch_npu.npu_fused_infer_attention_score)
    assert not all(torch.equal(whole, each) for each in others), "the control: the fused attention depends on chunks"


def test_other_layouts_rejected():
    query, key, value = (each[None].npu() for each in sequence())
    with pytest.raises(NotImplementedError, match="input_layout BSND is not emulated"):
        OPERATORS.npu_fused_infer_attention_score_batch_invariant(query, key, value, input_layout="BSND")


def test_package_comes_from_the_emulator():
    assert "npu_emulator" in batch_invariant_ops.__file__
