"""Attention over sequences of different lengths, from packed tensors and from paged caches. Scores are float32."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from .key_value_cache import as_integers
from .registry import operator

_SCORES_AT_ONCE = 1 << 23  # elements; bounds the memory of padded batches
_FAR = 1 << 31  # further than any key


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of queries [batch, heads, q, d] to keys [batch, kv heads, k, d] and values [batch, kv heads, k, dv].

    Where `hidden` (broadcastable to [batch, heads, q, k]) is true, keys are not seen; a query that sees none gives
    zeros.
    Returns the float32 output [batch, heads, q, dv], the largest score and the sum of exponentials [batch, heads, q].
    """
    shared = query.shape[1] // key.shape[1]
    scores = (query.float() @ _for_every_head(key, shared).transpose(-1, -2)) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    largest = scores.detach().amax(-1, keepdim=True).clamp(min=-1e30)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    output = (weights / total.clamp(min=1e-30)) @ _for_every_head(value, shared)
    return output, largest.squeeze(-1), total.squeeze(-1)


def _for_every_head(states: Tensor, shared: int) -> Tensor:
    """In float32, each head as often as query heads share it: one copy at a time, since workspace is the device's."""
    return states.float().repeat_interleave(shared, 1) if shared > 1 else states.float()


def _batches(query_lengths: list[int], key_lengths: list[int], heads: int) -> Iterator[range]:
    """Consecutive sequences that are worth padding to one batch."""
    start, longest = 0, (0, 0)
    for index, lengths in enumerate(zip(query_lengths, key_lengths, strict=True)):
        grown = (max(longest[0], lengths[0]), max(longest[1], lengths[1]))
        if index > start and (index + 1 - start) * grown[0] * grown[1] * heads > _SCORES_AT_ONCE:
            yield range(start, index)
            start, grown = index, lengths
        longest = grown
    if start < len(query_lengths):
        yield range(start, len(query_lengths))


def _padded(packed: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Packed sequences [tokens, heads, size] as [batch, heads, longest, size]; past its end a row is arbitrary."""
    positions = (starts.unsqueeze(-1) + torch.arange(int(lengths.max()))).clamp(max=max(packed.shape[0] - 1, 0))
    return packed[positions].transpose(1, 2)


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: list[int],
    key_lengths: list[int],
    scale: float,
    causal: str | None,
    mask: Tensor | None = None,
    band: tuple[int, int] = (_FAR, 0),
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention within each of several sequences packed one after another: [tokens, heads, size].

    `causal` lets the first query see the first key ("first"), or the last query the last key ("last"), and so on; of
    the keys before and after that one it sees as many as `band` says. A `mask` [q, k] that is true where a key is
    hidden applies to the top left corner of each sequence.
    Returns float32 output [tokens, heads, dv], and the largest score and sum of exponentials [tokens, heads].
    """
    outputs, maxima, totals = [], [], []
    query_ends, key_ends = torch.tensor(query_lengths).cumsum(0), torch.tensor(key_lengths).cumsum(0)
    for batch in _batches(query_lengths, key_lengths, query.shape[1]):
        picked = slice(batch.start, batch.stop)
        q_lengths, k_lengths = torch.tensor(query_lengths[picked]), torch.tensor(key_lengths[picked])
        if not int(q_lengths.max()) or not int(k_lengths.max()):
            shape = (int(q_lengths.sum()), query.shape[1])
            outputs.append(query.new_zeros(*shape, value.shape[-1], dtype=torch.float32))
            maxima.append(query.new_full(shape, -1e30, dtype=torch.float32))
            totals.append(query.new_zeros(shape, dtype=torch.float32))
            continue
        key_starts = key_ends[picked] - k_lengths
        q = _padded(query, query_ends[picked] - q_lengths, q_lengths)
        hidden = _hidden_keys(q_lengths, k_lengths, causal, mask, band)
        k, v = _padded(key, key_starts, k_lengths), _padded(value, key_starts, k_lengths)
        real = torch.arange(q.shape[2]) < q_lengths.unsqueeze(-1)
        for collected, result in zip((outputs, maxima, totals), attend(q, k, v, scale, hidden), strict=True):
            collected.append(result.transpose(1, 2)[real])
    return torch.cat(outputs), torch.cat(maxima), torch.cat(totals)


def _hidden_keys(
    query_lengths: Tensor,
    key_lengths: Tensor,
    causal: str | None,
    mask: Tensor | None,
    band: tuple[int, int] = (_FAR, 0),
) -> Tensor | None:
    """What attend() takes as `hidden`, for sequences padded to the longest."""
    queries, keys = int(query_lengths.max()), int(key_lengths.max())
    column = torch.arange(keys)
    hidden = None
    if int(key_lengths.min()) < keys:
        hidden = (column >= key_lengths.unsqueeze(-1)).view(-1, 1, 1, keys)
    if causal is not None:
        offsets = key_lengths - query_lengths if causal == "last" else torch.zeros_like(key_lengths)
        own = (torch.arange(queries) + offsets.unsqueeze(-1)).unsqueeze(-1)
        outside = ((column > own + band[1]) | (column < own - band[0])).unsqueeze(1)
        hidden = outside if hidden is None else hidden | outside
    if mask is not None:
        masked = mask[:queries, :keys].bool()
        hidden = masked if hidden is None else hidden | masked
    return hidden


def attend_paged(
    query: Tensor,
    key_caches: list[Tensor],
    value_cache: Tensor,
    block_table: Tensor,
    query_lengths: list[int],
    context_lengths: list[int],
    scale: float,
) -> Tensor:
    """Causal attention of packed queries [tokens, heads, size] to sequences whose keys lie in a paged cache.

    The last query of a sequence sees all of its context. Keys are `key_caches` side by side.
    Returns float32 [tokens, heads, dv].
    """
    outputs = []
    query_ends = torch.tensor(query_lengths).cumsum(0)
    for batch in _batches(query_lengths, context_lengths, query.shape[1]):
        picked = slice(batch.start, batch.stop)
        q_lengths, k_lengths = torch.tensor(query_lengths[picked]), torch.tensor(context_lengths[picked])
        if not int(q_lengths.max()):
            continue
        longest = int(k_lengths.max())
        blocks = block_table[picked, : -(-longest // value_cache.shape[1])].long().clamp(min=0)
        # Of contexts that fit a block, only what is there is copied; in all of them whole blocks would be most of the
        # workspace, which is charged to the device.
        keys = [cache[:, :longest][blocks].flatten(1, 2)[:, :longest].transpose(1, 2) for cache in key_caches]
        values = value_cache[:, :longest][blocks].flatten(1, 2)[:, :longest].transpose(1, 2)
        q = _padded(query, query_ends[picked] - q_lengths, q_lengths)
        hidden = _hidden_keys(q_lengths, k_lengths, "last", None)
        output, _, _ = attend(q, keys[0] if len(keys) == 1 else torch.cat(keys, -1), values, scale, hidden)
        outputs.append(output.transpose(1, 2)[torch.arange(q.shape[2]) < q_lengths.unsqueeze(-1)])
    return torch.cat(outputs) if outputs else query.new_zeros(0, query.shape[1], value_cache.shape[-1])


def _heads(states: Tensor, heads: int) -> Tensor:
    """Packed states as [tokens, heads, size]."""
    return states.reshape(states.shape[0], heads, -1)


def _write(out: Tensor, attended: Tensor) -> None:
    """Fill the first rows of `out`; rows past the last sequence keep what they held."""
    out[: attended.shape[0]].copy_(attended.view(attended.shape[0], *out.shape[1:]))


@operator(
    "_npu_flash_attention(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor seq_len, float scale_value, "
    "int num_heads, int num_kv_heads, Tensor(a!) out) -> ()",
    namespace="atb",
)
def _npu_flash_attention(query, key, value, mask, seq_len, scale_value, num_heads, num_kv_heads, out):
    lengths = as_integers(seq_len)
    states = (_heads(query, num_heads), _heads(key, num_kv_heads), _heads(value, num_kv_heads))
    _write(out, attend_packed(*states, lengths, lengths, scale_value, "last")[0])


@operator(
    "_npu_flash_attention_unpad(Tensor query, Tensor key, Tensor value, Tensor seq_len, float scale_value, int "
    "num_heads, int num_kv_heads, Tensor(a!) out) -> ()",
    namespace="atb",
)
def _npu_flash_attention_unpad(query, key, value, seq_len, scale_value, num_heads, num_kv_heads, out):
    lengths = as_integers(seq_len)
    states = (_heads(query, num_heads), _heads(key, num_kv_heads), _heads(value, num_kv_heads))
    _write(out, attend_packed(*states, lengths, lengths, scale_value, None)[0])


@operator(
    "_npu_flash_attention_qlens(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor mask, "
    "Tensor seq_len, Tensor context_lens, int num_kv_heads, int num_heads, float scale_value, Tensor(a!) out) -> ()",
    namespace="atb",
)
def _npu_flash_attention_qlens(
    query, key_cache, value_cache, block_table, mask, seq_len, context_lens, num_kv_heads, num_heads, scale_value, out
):
    lengths = (as_integers(seq_len), as_integers(context_lens))
    _write(out, attend_paged(_heads(query, num_heads), [key_cache], value_cache, block_table, *lengths, scale_value))


@operator(
    "_npu_paged_attention_splitfuse(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
    "Tensor context_lens, Tensor mask, Tensor seq_len, int num_kv_heads, int num_heads, float scale_value, "
    "Tensor(a!) out) -> ()",
    namespace="atb",
)
def _npu_paged_attention_splitfuse(
    query, key_cache, value_cache, block_table, context_lens, mask, seq_len, num_kv_heads, num_heads, scale_value, out
):
    lengths = (as_integers(seq_len), as_integers(context_lens))
    _write(out, attend_paged(_heads(query, num_heads), [key_cache], value_cache, block_table, *lengths, scale_value))


@operator(
    "_npu_paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, int num_heads, "
    "float scale_value, Tensor block_table, Tensor context_lens, Tensor(a!) out) -> ()",
    namespace="atb",
)
def _npu_paged_attention(
    query, key_cache, value_cache, num_kv_heads, num_heads, scale_value, block_table, context_lens, out
):
    lengths = as_integers(context_lens)
    one_each = [1] * len(lengths)
    queries = _heads(query, num_heads)[: len(lengths)]
    _write(out, attend_paged(queries, [key_cache], value_cache, block_table, one_each, lengths, scale_value))


@operator(
    "_npu_paged_attention_mla(Tensor query, Tensor key_cache, int num_kv_heads, int num_heads, float scale_value, "
    "Tensor block_table, Tensor context_lens, int mla_vheadsize, Tensor(a!) out) -> ()",
    namespace="atb",
)
def _npu_paged_attention_mla(
    query, key_cache, num_kv_heads, num_heads, scale_value, block_table, context_lens, mla_vheadsize, out
):
    lengths = as_integers(context_lens)
    one_each = [1] * len(lengths)
    queries = _heads(query, num_heads)[: len(lengths)]
    values = key_cache[..., :mla_vheadsize]
    _write(out, attend_paged(queries, [key_cache], values, block_table, one_each, lengths, scale_value))


@operator(
    "npu_multi_head_latent_attention(Tensor q_nope, Tensor q_rope, Tensor ctkv, Tensor k_rope, Tensor block_tables, "
    "Tensor context_lens, int q_headnum, float qk_scale, int kv_headnum, *, Tensor? mask=None, Tensor? qseqlen=None) "
    "-> Tensor",
    namespace="atb",
)
def npu_multi_head_latent_attention(
    q_nope,
    q_rope,
    ctkv,
    k_rope,
    block_tables,
    context_lens,
    q_headnum,
    qk_scale,
    kv_headnum,
    *,
    mask=None,
    qseqlen=None,
):
    lengths = as_integers(context_lens)
    query_lengths = [1] * len(lengths) if qseqlen is None else as_integers(qseqlen)
    queries = torch.cat((_heads(q_nope, q_headnum), _heads(q_rope, q_headnum)), -1)
    attended = attend_paged(queries, [ctkv, k_rope], ctkv, block_tables, query_lengths, lengths, qk_scale)
    out = q_nope.new_zeros(q_nope.shape)
    _write(out, attended)
    return out


@operator(
    "npu_ring_mla(Tensor q_nope, Tensor q_rope, Tensor k_nope, Tensor k_rope, Tensor value, Tensor mask, Tensor "
    "seqlen, int head_num, int kv_head_num, *, Tensor? pre_out=None, Tensor? prev_lse=None, float qk_scale=1, "
    "str? kernel_type=None, str? mask_type=None, str? input_layout=None, str? calc_type=None, Tensor(a!) output, "
    "Tensor(b!) softmax_lse) -> ()",
    namespace="atb",
)
def npu_ring_mla(
    q_nope,
    q_rope,
    k_nope,
    k_rope,
    value,
    mask,
    seqlen,
    head_num,
    kv_head_num,
    *,
    output,
    softmax_lse,
    pre_out=None,
    prev_lse=None,
    qk_scale=1.0,
    kernel_type=None,
    mask_type=None,
    input_layout=None,
    calc_type=None,
):
    """One part of the keys: writes the output and the log-sum-exp [heads, tokens], merged with what came before.

    `seqlen` holds the lengths of the queries and keys, or of the queries and those of the keys in two rows. Sequences
    without keys keep what came before.
    """
    rows = [seqlen, seqlen] if seqlen.dim() == 1 else list(seqlen)
    query_lengths, key_lengths = (as_integers(row) for row in rows)
    query, key = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1)
    causal = "first" if mask_type == "mask_type_triu" else None
    attended, largest, total = attend_packed(query, key, value, query_lengths, key_lengths, qk_scale, causal)
    lse = (largest + total.log()).t()
    if calc_type == "calc_type_default":
        merged = torch.logaddexp(prev_lse[:, : lse.shape[1]].float(), lse)
        earlier = (prev_lse[:, : lse.shape[1]].float() - merged).exp().t().unsqueeze(-1)
        attended = pre_out[: attended.shape[0]].float() * earlier + attended * (lse - merged).exp().t().unsqueeze(-1)
        lse = merged
    _write(output, attended)
    softmax_lse[:, : lse.shape[1]].copy_(lse)


def to_heads_first(states: Tensor, layout: str, heads: int) -> Tensor:
    """Any batched layout as [batch, heads, sequence, size]."""
    if layout == "BNSD":
        return states
    if layout == "BSND":
        return states.transpose(1, 2)
    if layout == "BSH":
        return states.unflatten(-1, (heads, -1)).transpose(1, 2)
    if layout == "SBH":
        return states.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
    raise RuntimeError(f"npu_fusion_attention: input_layout must be BSH, SBH, BSND, BNSD or TND, not {layout!r}")


def from_heads_first(states: Tensor, layout: str) -> Tensor:
    if layout == "BNSD":
        return states
    if layout == "BSND":
        return states.transpose(1, 2)
    if layout == "BSH":
        return states.transpose(1, 2).flatten(2)
    return states.permute(2, 0, 1, 3).flatten(2)


def hidden_by_sparse_mode(
    sparse_mode: int, mask: Tensor | None, queries: int, keys: int, before: int, after: int
) -> Tensor | None:
    """True where a key is hidden, for the sparse modes of npu_fusion_attention on batched layouts."""
    if sparse_mode in (0, 1):
        return None if mask is None else mask.bool()
    row, column = torch.arange(queries).unsqueeze(-1), torch.arange(keys)
    if sparse_mode == 2:
        return column > row
    if sparse_mode == 3:
        return column > row + (keys - queries)
    if sparse_mode == 4:
        row = row + (keys - queries)
        return (column > row + after) | (column < row - before)
    raise NotImplementedError(f"npu_fusion_attention: sparse_mode {sparse_mode} is not emulated")


def _fusion_packed(query, key, value, scale, atten_mask, query_ends, key_ends, sparse_mode, band):
    """npu_fusion_attention for TND; ends are running totals of the lengths."""
    if query_ends is None or key_ends is None:
        raise RuntimeError("npu_fusion_attention: TND needs actual_seq_qlen and actual_seq_kvlen")
    query_lengths = [stop - start for start, stop in pairwise([0, *query_ends])]
    key_lengths = [stop - start for start, stop in pairwise([0, *key_ends])]
    if sparse_mode not in (0, 1, 2, 3, 4):
        raise NotImplementedError(f"npu_fusion_attention: sparse_mode {sparse_mode} with TND is not emulated")
    causal = {2: "first", 3: "last", 4: "last"}.get(sparse_mode)
    mask = None if causal else atten_mask
    band = band if sparse_mode == 4 else (_FAR, 0)
    output, largest, total = attend_packed(query, key, value, query_lengths, key_lengths, scale, causal, mask, band)
    return output.to(query.dtype), largest, total


@operator(
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? "
    "pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., int "
    "pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, int[]? "
    "actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool "
    "sync=False) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
    differentiable=True,
)
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
):
    """Attention for training: the output in the layout of the query, then the largest score and the sum of exponentials
    ([batch, heads, q, 8] or, for TND, [tokens, heads, 8]), an empty tensor and three numbers for dropout."""
    if pse is not None or padding_mask is not None or prefix is not None or keep_prob != 1.0:
        raise NotImplementedError("npu_fusion_attention: pse, padding_mask, prefix and dropout are not emulated")
    if input_layout == "TND":
        output, largest, total = _fusion_packed(
            query,
            key,
            value,
            scale,
            atten_mask,
            actual_seq_qlen,
            actual_seq_kvlen,
            sparse_mode,
            (pre_tockens, next_tockens),
        )
    else:
        q = to_heads_first(query, input_layout, head_num)
        key_heads = head_num if input_layout in ("BNSD", "BSND") else key.shape[-1] // q.shape[-1]
        k, v = (to_heads_first(states, input_layout, key_heads) for states in (key, value))
        hidden = hidden_by_sparse_mode(sparse_mode, atten_mask, q.shape[2], k.shape[2], pre_tockens, next_tockens)
        output, largest, total = attend(q, k, v, scale, hidden)
        output = from_heads_first(output.to(query.dtype), input_layout).contiguous()
    statistics = [item.detach().unsqueeze(-1).expand(*item.shape, 8).contiguous() for item in (largest, total)]
    return output, *statistics, query.new_empty(0), 0, 0, 0
