"""Attention for inference, from plain tensors and from paged caches: whole prompts, single tokens, and both in one."""

from itertools import pairwise

import torch
from torch import Tensor

from .attention import attend_packed
from .key_value_cache import as_integers, load
from .registry import operator

_NAME = "npu_fused_infer_attention_score"
_EVERYTHING = 2147483647
_SCHEMA = (
    f"{_NAME}(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? "
    "actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None, Tensor? "
    "quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, Tensor? "
    "antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None, Tensor? "
    "key_antiquant_offset=None, Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None, Tensor? "
    "block_table=None, Tensor? query_padding_size=None, Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, "
    "Tensor? value_shared_prefix=None, SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? "
    "key_rope=None, Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, int "
    "pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', int num_key_value_heads=0, int "
    "sparse_mode=0, int inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0, int "
    "value_antiquant_mode=0, bool softmax_lse_flag=False) -> (Tensor, Tensor)"
)


def _rows(states: Tensor, layout: str, heads: int) -> Tensor:
    """Batched states in any layout as [batch, sequence, heads, size]."""
    if layout == "BSH":
        return states.unflatten(-1, (heads, -1))
    return states.transpose(1, 2) if layout == "BNSD" else states


def _in_layout(rows: Tensor, layout: str) -> Tensor:
    """The inverse of `_rows`."""
    if layout == "BSH":
        return rows.flatten(2)
    return rows.transpose(1, 2).contiguous() if layout == "BNSD" else rows


def _pack(rows: Tensor, lengths: list[int]) -> Tensor:
    """The first rows of each sequence of [batch, sequence, ...], one after another."""
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])


def _unpack(packed: Tensor, lengths: list[int], longest: int) -> Tensor:
    """The inverse of `_pack`, with zeros after the end of a sequence."""
    rows = packed.new_zeros(len(lengths), longest, *packed.shape[1:])
    for row, part in zip(rows, packed.split(lengths), strict=True):
        row[: part.shape[0]] = part
    return rows


def _lengths_from_ends(ends) -> list[int]:
    return [stop - start for start, stop in pairwise([0, *as_integers(ends)])]


def _from_pages(cache: Tensor, heads: int, block_size: int, block_table: Tensor, lengths: list[int]) -> Tensor:
    """The sequences that lie in a paged cache, packed [tokens, heads, size].

    The cache is [blocks, block size, heads * size], [blocks, heads, block size, size] or, in the private format NZ,
    [blocks, heads, size / 16, block size, 16].
    """
    if cache.dim() == 5:
        paged = cache.permute(0, 3, 1, 2, 4).flatten(3)
    elif cache.dim() == 4:
        paged = cache.transpose(1, 2)
    else:
        paged = cache.unflatten(-1, (heads, -1))
    if paged.shape[1] != block_size:
        raise RuntimeError(f"{_NAME}: block_size is {block_size}, but blocks of the cache hold {paged.shape[1]} tokens")
    return torch.cat([load(paged, blocks, 0, length) for blocks, length in zip(block_table, lengths, strict=True)])


def _shapes(query: Tensor, key: Tensor, value: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Empty results. The size of a value is known from its last dimension, or two of them in the format NZ."""
    layout, heads = options.get("input_layout", "BSH"), options.get("num_heads", 1)
    key_heads = options.get("num_key_value_heads", 0) or heads
    shape = list(query.shape)
    if layout == "BSH":
        shape[-1] = value.shape[-1] // key_heads * heads
    else:
        shape[-1] = _size_of_head(value, layout, key_heads, options.get("block_table") is not None)
    lse = query.new_empty(1, dtype=torch.float32)
    if options.get("softmax_lse_flag"):
        tokens = (shape[0],) if layout == "TND" else (shape[0], heads, shape[1] if layout != "BNSD" else shape[2])
        lse = query.new_empty((*tokens, heads, 1) if layout == "TND" else (*tokens, 1), dtype=torch.float32)
    return query.new_empty(shape), lse


def _size_of_head(value: Tensor, layout: str, key_heads: int, paged: bool) -> int:
    if value.dim() == 5:
        return value.shape[2] * value.shape[4]
    return value.shape[-1] // key_heads if paged and value.dim() == 3 else value.shape[-1]


def _packed_queries(query: Tensor, layout: str, heads: int, lengths) -> tuple[Tensor, list[int]]:
    """Queries one after another [tokens, heads, size], and the length of each sequence."""
    if layout == "TND":
        return query, _lengths_from_ends(lengths)
    rows = _rows(query, layout, heads)
    lengths = _given_or_whole(lengths, rows)
    return _pack(rows, lengths), lengths


def _packed_keys(
    states: Tensor, layout: str, heads: int, lengths, block_table: Tensor | None, block_size: int
) -> tuple[Tensor, list[int]]:
    """Keys or values one after another [tokens, heads, size], and the length of each sequence."""
    if block_table is None:
        return _packed_queries(states, layout, heads, lengths)
    lengths = as_integers(lengths)
    return _from_pages(states, heads, block_size, block_table, lengths), lengths


def _given_or_whole(lengths, rows: Tensor) -> list[int]:
    """Lengths of sequences; one that is given counts for all."""
    if lengths is None:
        return [rows.shape[1]] * rows.shape[0]
    lengths = as_integers(lengths)
    return lengths * rows.shape[0] if len(lengths) == 1 else lengths


def _shared_mask(mask: Tensor | None) -> Tensor | None:
    """A mask [q, k] for all sequences, from one that may have leading dimensions of size 1."""
    if mask is not None and mask.shape[:-2].numel() != 1:
        raise NotImplementedError(f"{_NAME}: a mask of its own for each sequence is not emulated")
    return mask if mask is None else mask.reshape(mask.shape[-2:])


def _refuse(layout: str, sparse_mode: int, others: dict) -> None:
    """Raise NotImplementedError for quantisation, padding, shared prefixes, windows and other layouts."""
    if layout not in ("BSH", "BSND", "BNSD", "TND"):
        raise NotImplementedError(f"{_NAME}: input_layout {layout!r} is not emulated")
    if sparse_mode not in (0, 1, 2, 3):
        raise NotImplementedError(f"{_NAME}: sparse_mode {sparse_mode} is not emulated")
    for name, value in others.items():
        whole = name in ("pre_tokens", "next_tokens") and value >= _EVERYTHING
        without_effect = name == "inner_precise" or (isinstance(value, int) and value == 0)
        if value is not None and not whole and not without_effect:
            raise NotImplementedError(f"{_NAME}: {name} is not emulated")


@operator(_SCHEMA, shapes=_shapes)
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **others,
):
    """The output in the layout of the query, and the log-sum-exp of each query, float32, if asked for.

    `actual_seq_lengths` are lengths; with TND they are running totals, those of keys only without a `block_table`.
    Rotary parts are put beside queries and keys. Queries without keys, and rows past the end of a sequence, give
    zeros. Modes 0 and 1 hide what `atten_mask` says, 2 and 3 what comes after, counted from the first or the last key.
    """
    _refuse(input_layout, sparse_mode, others)
    paging = (num_key_value_heads or num_heads, actual_seq_lengths_kv, block_table, block_size)
    queries, query_lengths = _packed_queries(query, input_layout, num_heads, actual_seq_lengths)
    keys, key_lengths = _packed_keys(key, input_layout, *paging)
    values, _ = _packed_keys(value, input_layout, *paging)
    if query_rope is not None:
        turned, _ = _packed_queries(query_rope, input_layout, num_heads, actual_seq_lengths)
        queries = torch.cat((queries, turned), -1)
        keys = torch.cat((keys, _packed_keys(key_rope, input_layout, *paging)[0]), -1)
    causal = {2: "first", 3: "last"}.get(sparse_mode)
    mask = None if causal else _shared_mask(atten_mask)
    attended, largest, total = attend_packed(queries, keys, values, query_lengths, key_lengths, scale, causal, mask)
    attended, lse = attended.to(query.dtype), (largest + total.log()).unsqueeze(-1)
    if input_layout != "TND":
        longest = _rows(query, input_layout, num_heads).shape[1]
        attended = _in_layout(_unpack(attended, query_lengths, longest), input_layout)
        lse = _unpack(lse, query_lengths, longest).transpose(1, 2).contiguous()
    return attended, lse if softmax_lse_flag else lse.new_zeros(1)


def _refuse_others(name: str, sparse_mode: int, others: dict) -> None:
    """Raise NotImplementedError for position encodings, quantisation, padding and bands."""
    given = [argument for argument, value in others.items() if value is not None]
    if given:
        raise NotImplementedError(f"{name}: {', '.join(given)} is not emulated")
    if sparse_mode not in (0, 1, 2, 3):
        raise NotImplementedError(f"{name}: sparse_mode {sparse_mode} is not emulated")


@operator(
    "npu_prompt_flash_attention(Tensor query, Tensor key, Tensor value, *, Tensor? padding_mask=None, Tensor? "
    "atten_mask=None, Tensor? pse_shift=None, int[]? actual_seq_lengths=None, Tensor? deq_scale1=None, Tensor? "
    "quant_scale1=None, Tensor? deq_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, int "
    "num_heads=1, float scale_value=1.0, int pre_tokens=2147473647, int next_tokens=0, str input_layout='BSH', int "
    "num_key_value_heads=0, int[]? actual_seq_lengths_kv=None, int sparse_mode=0) -> Tensor",
    shapes=lambda query, key, value, **_: torch.empty_like(query),
)
def npu_prompt_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = 2147473647,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    actual_seq_lengths_kv: list[int] | None = None,
    sparse_mode: int = 0,
    **others,
):
    """Attention of whole prompts, in the layout of the query; rows past the end of a sequence give zeros.

    Modes 0 and 1 hide what `atten_mask` says, and nothing without one; 2 and 3 hide what comes after, counted from the
    first or the last key. In none of them do `pre_tokens` and `next_tokens` change that: with a mask they have to agree
    with it. Page: torch_npu.npu_prompt_flash_attention.
    """
    _refuse_others("npu_prompt_flash_attention", sparse_mode, others)
    return npu_fused_infer_attention_score(
        query,
        key,
        value,
        atten_mask=atten_mask,
        actual_seq_lengths=actual_seq_lengths,
        actual_seq_lengths_kv=actual_seq_lengths_kv,
        num_heads=num_heads,
        scale=scale_value,
        input_layout=input_layout,
        num_key_value_heads=num_key_value_heads,
        sparse_mode=sparse_mode,
    )[0]


@operator(
    "npu_incre_flash_attention(Tensor query, Tensor key, Tensor value, *, Tensor? padding_mask=None, Tensor? "
    "atten_mask=None, Tensor? pse_shift=None, SymInt[]? actual_seq_lengths=None, Tensor? antiquant_scale=None, Tensor? "
    "antiquant_offset=None, Tensor? block_table=None, Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? "
    "dequant_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, Tensor? kv_padding_size=None, int "
    "num_heads=1, float scale_value=1.0, str input_layout='BSH', int num_key_value_heads=0, int block_size=0, int "
    "inner_precise=1) -> Tensor",
    shapes=lambda query, key, value, **_: torch.empty_like(query),
)
def npu_incre_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_size: int = 0,
    inner_precise: int = 1,
    **others,
):
    """Attention of one new token a sequence to all that came before, in the layout of the query.

    `actual_seq_lengths` are those of keys and values, which may lie in a paged cache.
    Page: torch_npu.npu_incre_flash_attention.
    """
    _refuse_others("npu_incre_flash_attention", 0, others)
    if atten_mask is not None:
        raise NotImplementedError("npu_incre_flash_attention: atten_mask is not emulated")
    if _rows(query, input_layout, num_heads).shape[1] != 1:
        raise RuntimeError("npu_incre_flash_attention: a sequence must have one query")
    return npu_fused_infer_attention_score(
        query,
        key,
        value,
        actual_seq_lengths_kv=actual_seq_lengths,
        block_table=block_table,
        num_heads=num_heads,
        scale=scale_value,
        input_layout=input_layout,
        num_key_value_heads=num_key_value_heads,
        block_size=block_size,
    )[0]
