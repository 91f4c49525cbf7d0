"""Huawei's package `batch_invariant_ops` for the emulated device, which vLLM-Ascend's batch-invariant mode needs.

vLLM-Ascend 0.23 imports it if VLLM_BATCH_INVARIANT=1, and replaces `aten::mm`, `aten::matmul`, `aten::sum` and the
fused attention by its operators. The published ones are kernels for CANN. These compute one row, or the attention of
one query, at a time, so the rest of the batch cannot influence a result. The published kernels' division of work is not
emulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch_npu  # noqa: F401  (defines the operator whose schema is taken)
from torch import Tensor

_NAMESPACE = "batch_invariant_ops"
_ATTENTION = torch.ops.npu.npu_fused_infer_attention_score
# PyTorch leaves out what is as the schema has it.
_DEFAULTS = {"input_layout": "BSH", "sparse_mode": 0, "block_table": None, "softmax_lse_flag": False}
_CAUSAL_AT_THE_END = 3  # the sparse_mode in which the last query sees the last key, and each before it one key less


def mm(self: Tensor, mat2: Tensor) -> Tensor:
    """[rows, inner] x [inner, columns], each row a product of its own.

    A batch of products of one row: torch.mm is this very function in vLLM-Ascend's mode, and torch.bmm is not.
    """
    rows = self.shape[0]
    return torch.bmm(self.unsqueeze(1), mat2.unsqueeze(0).expand(rows, -1, -1)).squeeze(1)


def matmul(self: Tensor, other: Tensor) -> Tensor:
    """As torch.matmul, each row a product of its own; `other` has one, two or as many dimensions as `self`."""
    if other.dim() == 1:
        return matmul(self, other.unsqueeze(1)).squeeze(-1)
    if self.dim() == 1:
        return matmul(self.unsqueeze(0), other).squeeze(-2)
    if other.dim() == 2:
        return mm(self.flatten(0, -2), other).unflatten(0, self.shape[:-1])
    batch = torch.broadcast_shapes(self.shape[:-2], other.shape[:-2])
    left = self.expand(*batch, -1, -1).flatten(0, -3)
    right = other.expand(*batch, -1, -1).flatten(0, -3)
    products = [mm(one, another) for one, another in zip(left.unbind(), right.unbind(), strict=True)]
    return torch.stack(products).unflatten(0, batch)


def reduce_sum(self: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """The sum over one dimension. The host adds up each row in an order that depends on its length alone."""
    return torch.ops.aten.sum.dim_IntList(self, [dim], keepdim)


def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """As npu_fused_infer_attention_score of packed sequences (TND), each query a sequence of its own.

    Whether a query comes in a whole prompt, in a part of it or alone in a decode step, it sees the same keys in the
    same call.
    """
    options = _DEFAULTS | options
    if options["input_layout"] != "TND":
        raise NotImplementedError(f"input_layout {options['input_layout']} is not emulated, only TND")
    if options["sparse_mode"] not in (0, _CAUSAL_AT_THE_END):
        raise NotImplementedError(f"sparse_mode {options['sparse_mode']} is not emulated, only 0 and 3")
    ends = options["actual_seq_lengths"]
    lengths = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    is_causal = options["sparse_mode"] == _CAUSAL_AT_THE_END
    if options["block_table"] is not None:
        return _of_blocks(query, key, value, lengths, is_causal, options)
    return _of_whole_sequences(query, key, value, lengths, is_causal, options)


def _seen(queries: int, keys: int, is_causal: bool) -> list[int]:
    """Return how many keys each query of a sequence sees."""
    return [keys - queries + 1 + place if is_causal else keys for place in range(queries)]


def _of_blocks(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], is_causal: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Make one call for all queries: the kernel computes sequences one after the other, and blocks may be shared."""
    all_keys = options["actual_seq_lengths_kv"]
    seen = [
        count for queries, keys in zip(lengths, all_keys, strict=False) for count in _seen(queries, keys, is_causal)
    ]
    numbers = [number for number, queries in enumerate(lengths) for _ in range(queries)]
    blocks = options["block_table"].index_select(0, torch.tensor(numbers, device=query.device))
    own = {"actual_seq_lengths": [*range(1, len(seen) + 1)], "actual_seq_lengths_kv": seen, "block_table": blocks}
    return _ATTENTION(query, key, value, **(options | own))


def _of_whole_sequences(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], is_causal: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Make one call for each query: packed keys cannot be shared by sequences."""
    outputs, sums = [], []
    key_ends = options["actual_seq_lengths_kv"]
    key_starts = [0, *key_ends[:-1]]
    place = 0
    for queries, start, end in zip(lengths, key_starts, key_ends, strict=True):
        for count in _seen(queries, end - start, is_causal):
            own = {"actual_seq_lengths": [1], "actual_seq_lengths_kv": [count]}
            keys, values = (tensor[start : start + count] for tensor in (key, value))
            found = _ATTENTION(query[place : place + 1], keys, values, **(options | own))
            outputs.append(found[0])
            sums.append(found[1])
            place += 1
    return torch.cat(outputs), torch.cat(sums) if options["softmax_lse_flag"] else sums[0]


def _register() -> torch.library.Library:
    library = torch.library.Library(_NAMESPACE, "DEF")
    attention_name = "npu_fused_infer_attention_score_batch_invariant"
    schema = str(_ATTENTION.default._schema).partition("(")[2]
    defined = {
        "npu_mm_batch_invariant(Tensor self, Tensor mat2) -> Tensor": mm,
        "npu_matmul_batch_invariant(Tensor self, Tensor other) -> Tensor": matmul,
        "npu_reduce_sum_batch_invariant(Tensor self, int dim, bool keepdim=False) -> Tensor": reduce_sum,
        f"{attention_name}({schema}": attention,
    }
    for signature, function in defined.items():
        library.define(signature)
        library.impl(signature.partition("(")[0], function, "PrivateUse1")
    return library


_LIBRARY = _register()
