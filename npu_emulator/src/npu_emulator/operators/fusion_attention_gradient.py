"""The gradient of npu_fusion_attention as an operator of its own, and the second version of both.

Context parallelism calls them with statistics of the softmax that were merged over parts of the keys, so the gradient
is computed from the statistics and the output that are given, never from new ones.
"""

from itertools import pairwise

import torch
from torch import Tensor

from .attention import from_heads_first, hidden_by_sparse_mode, npu_fusion_attention, to_heads_first
from .registry import operator

_EVERYTHING = 2147483647


def _refuse(name: str, keep_prob: float, **given) -> None:
    """Raise NotImplementedError for dropout, position encodings and prefixes."""
    if keep_prob != 1.0:
        raise NotImplementedError(f"{name}: dropout is not emulated")
    for argument, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name}: {argument} is not emulated")


def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    output: Tensor,
    statistics: tuple[Tensor, Tensor],
    scale: float,
    hidden: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 gradients of queries, keys and values, each [batch, heads, sequence, size].

    With P the attention weights and dO the gradient of the output O: dV = P^T dO, and the scores have the gradient
    ``P * (dO V^T - rowsum(dO * O))``. `statistics` are the largest score and the sum of exponentials of each query.
    """
    query, key, value, gradient, output = (states.float() for states in (query, key, value, gradient, output))
    key_heads, shared = key.shape[1], query.shape[1] // key.shape[1]
    keys, values = (states.repeat_interleave(shared, 1) for states in (key, value))
    scores = query @ keys.transpose(-1, -2) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    largest, total = (statistic.unsqueeze(-1) for statistic in statistics)
    weights = (scores - largest).exp() / total.clamp(min=1e-30)
    of_scores = weights * (gradient @ values.transpose(-1, -2) - (gradient * output).sum(-1, keepdim=True)) * scale
    of_keys, of_values = of_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ gradient
    return of_scores @ keys, *(part.unflatten(1, (key_heads, shared)).sum(2) for part in (of_keys, of_values))


def _packed_gradients(states: tuple[Tensor, ...], statistics, query_ends, key_ends, scale, mask, sparse_mode, band):
    """_gradients of sequences one after another [tokens, heads, size]; ends are running totals of the lengths."""
    query, key, value, gradient, output = states
    found = []
    for (start, stop), (first, last) in zip(pairwise([0, *query_ends]), pairwise([0, *key_ends]), strict=True):
        own = (query[start:stop], key[first:last], value[first:last], gradient[start:stop], output[start:stop])
        hidden = hidden_by_sparse_mode(sparse_mode, mask, stop - start, last - first, *band)
        if sparse_mode in (0, 1) and hidden is not None:
            hidden = hidden[: stop - start, : last - first]
        batched = (part.transpose(0, 1).unsqueeze(0) for part in own)
        parts = tuple(statistic[start:stop].t().unsqueeze(0) for statistic in statistics)
        found.append([part.squeeze(0).transpose(0, 1) for part in _gradients(*batched, parts, scale, hidden)])
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def _differentiate(states, head_num, layout, statistics, scale, mask, sparse_mode, band, query_ends, key_ends):
    """Gradients of query, key and value in their layout and type, and an empty one of the position encoding."""
    query, key = states[:2]
    statistics = tuple(statistic[..., 0].float() for statistic in statistics)
    if layout == "TND":
        found = _packed_gradients(states, statistics, query_ends, key_ends, scale, mask, sparse_mode, band)
    else:
        size = query.shape[-1] if layout in ("BNSD", "BSND") else query.shape[-1] // head_num
        key_heads = head_num if layout in ("BNSD", "BSND") else key.shape[-1] // size
        heads = (head_num, key_heads, key_heads, head_num, head_num)
        batched = [to_heads_first(part, layout, count) for part, count in zip(states, heads, strict=True)]
        lengths = (batched[0].shape[2], batched[1].shape[2])
        hidden = hidden_by_sparse_mode(sparse_mode, mask, *lengths, *band)
        found = (from_heads_first(part, layout) for part in _gradients(*batched, statistics, scale, hidden))
    results = (part.to(of.dtype).contiguous() for part, of in zip(found, states[:3], strict=True))
    return *results, query.new_empty(0)


def _shapes(query: Tensor, key: Tensor, value: Tensor, *_, **__) -> tuple[Tensor, ...]:
    return *(torch.empty_like(states) for states in (query, key, value)), query.new_empty(0)


@operator(
    "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, *, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? "
    "softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., float keep_prob=1., "
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int seed=0, int offset=0, int "
    "numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool "
    "gen_mask_parallel=True, bool sync=False) -> (Tensor, Tensor, Tensor, Tensor)",
    shapes=_shapes,
)
def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _EVERYTHING,
    next_tockens: int = _EVERYTHING,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    **without_effect,
):
    """Gradients of query, key and value from that of the output, and an empty tensor.

    `softmax_max`, `softmax_sum` and `attention_in` are results of the forward, or of several that were merged. What the
    operator does is on the page of aclnnFlashAttentionScoreGrad; torch_npu has none for it.
    """
    _refuse("npu_fusion_attention_grad", keep_prob, pse=pse, padding_mask=padding_mask, prefix=prefix)
    if softmax_max is None or softmax_sum is None or attention_in is None:
        raise RuntimeError("npu_fusion_attention_grad: softmax_max, softmax_sum and attention_in are needed")
    return _differentiate(
        (query, key, value, dy, attention_in),
        head_num,
        input_layout,
        (softmax_max, softmax_sum),
        scale_value,
        atten_mask,
        sparse_mode,
        (pre_tockens, next_tockens),
        actual_seq_qlen,
        actual_seq_kvlen,
    )


_MASKED = "Tensor? pse, Tensor? padding_mask, Tensor? atten_mask"
_LENGTHS = "int[]? prefix, int[]? actual_seq_qlen, int[]? actual_seq_kvlen, int sparse_mode"
_LAST = "bool gen_mask_parallel, bool sync, int pse_type, int[]? q_start_idx, int[]? kv_start_idx"


@operator(
    f"npu_fusion_attention_v2(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, {_MASKED}, float "
    f"scale, float keep_prob, int pre_tokens, int next_tokens, int inner_precise, {_LENGTHS}, {_LAST}) "
    "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
    namespace="npu_extension",
)
def npu_fusion_attention_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None,
    padding_mask: Tensor | None,
    atten_mask: Tensor | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    inner_precise: int,
    prefix: list[int] | None,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    sparse_mode: int,
    gen_mask_parallel: bool,
    sync: bool,
    pse_type: int,
    q_start_idx: list[int] | None,
    kv_start_idx: list[int] | None,
):
    """As torch_npu.npu_fusion_attention: the second version differs in position encodings, which are not emulated.

    Page: MindSpeed docs/ops/fusion_attention.md.
    """
    _refuse("npu_fusion_attention_v2", keep_prob, pse=pse, padding_mask=padding_mask, prefix=prefix)
    return npu_fusion_attention(
        query,
        key,
        value,
        head_num,
        input_layout,
        atten_mask=atten_mask,
        scale=scale,
        pre_tockens=pre_tokens,
        next_tockens=next_tokens,
        actual_seq_qlen=actual_seq_qlen,
        actual_seq_kvlen=actual_seq_kvlen,
        sparse_mode=sparse_mode,
    )


@operator(
    f"npu_fusion_attention_grad_v2(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, "
    f"{_MASKED}, Tensor? softmax_max, Tensor? softmax_sum, Tensor? softmax_in, Tensor? attention_in, float scale, "
    f"float keep_prob, int pre_tokens, int next_tokens, int inner_precise, int seed, int offset, int numels, "
    f"{_LENGTHS}, {_LAST}) -> (Tensor, Tensor, Tensor, Tensor)",
    namespace="npu_extension",
)
def npu_fusion_attention_grad_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None,
    padding_mask: Tensor | None,
    atten_mask: Tensor | None,
    softmax_max: Tensor | None,
    softmax_sum: Tensor | None,
    softmax_in: Tensor | None,
    attention_in: Tensor | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    inner_precise: int,
    seed: int,
    offset: int,
    numels: int,
    prefix: list[int] | None,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    sparse_mode: int,
    gen_mask_parallel: bool,
    sync: bool,
    pse_type: int,
    q_start_idx: list[int] | None,
    kv_start_idx: list[int] | None,
):
    """As torch_npu.npu_fusion_attention_grad, by position. Page: MindSpeed docs/ops/fusion_attention.md."""
    return npu_fusion_attention_grad(
        query,
        key,
        value,
        dy,
        head_num,
        input_layout,
        pse=pse,
        padding_mask=padding_mask,
        atten_mask=atten_mask,
        softmax_max=softmax_max,
        softmax_sum=softmax_sum,
        attention_in=attention_in,
        scale_value=scale,
        keep_prob=keep_prob,
        pre_tockens=pre_tokens,
        next_tockens=next_tokens,
        prefix=prefix,
        actual_seq_qlen=actual_seq_qlen,
        actual_seq_kvlen=actual_seq_kvlen,
        sparse_mode=sparse_mode,
    )
