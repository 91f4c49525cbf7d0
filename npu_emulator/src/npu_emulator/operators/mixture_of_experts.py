"""Routing tokens to experts and back."""

import torch
from torch import Tensor

from .registry import operator


@operator(
    "npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, int k_group=1, int group_count=1, int "
    "group_select_mode=0, int renorm=0, int norm_type=0, bool out_flag=False, float routed_scaling_factor=1.0, "
    "float eps=1e-20) -> (Tensor, Tensor, Tensor)"
)
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
):
    """Weights [tokens, k], experts [tokens, k] int32 and scores [tokens, experts], chosen by score plus bias.

    `norm_type` 0 scores by softmax, 1 by sigmoid. A group of experts counts by its best score (`group_select_mode` 0)
    or by the sum of its best two (1); only experts of the best `k_group` groups can be chosen. Sigmoid weights are
    divided by their sum plus `eps`.
    """
    scores = x.float().softmax(-1) if norm_type == 0 else x.float().sigmoid()
    choice = scores if bias is None else scores + bias.float()
    if group_count > 1:
        groups = choice.unflatten(-1, (group_count, -1))
        standing = groups.amax(-1) if group_select_mode == 0 else groups.topk(2, -1).values.sum(-1)
        best = standing.topk(k_group, -1).indices
        excluded = torch.ones_like(standing, dtype=torch.bool).scatter_(-1, best, False)
        choice = groups.masked_fill(excluded.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = choice.topk(k, -1).indices
    weights = scores.gather(-1, experts)
    if norm_type == 1 or renorm == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), experts.to(torch.int32), scores


@operator("npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)")
def npu_moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1):
    """Weights and experts [tokens, k] of the best k of a softmax, and the column-major numbers of the entries.

    Tokens that are `finished` get the expert one past the last.
    """
    weights, experts = x.float().softmax(-1).topk(k, -1)
    if finished is not None:
        experts = experts.masked_fill(finished.unsqueeze(-1), x.shape[-1])
    tokens = x.shape[0]
    rows = torch.arange(tokens * k, dtype=torch.int32).view(k, tokens).t().contiguous()
    return weights.to(x.dtype), experts.to(torch.int32), rows


def _init_routing_shapes(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int):
    numbers = expert_idx.new_empty(expert_idx.numel(), dtype=torch.int32)
    return x.new_empty(min(active_num, expert_idx.shape[0]) * expert_idx.shape[1], x.shape[1]), numbers, numbers.clone()


@operator(
    "npu_moe_init_routing(Tensor x, Tensor row_idx, Tensor expert_idx, SymInt active_num) -> (Tensor, Tensor, Tensor)",
    shapes=_init_routing_shapes,
)
def npu_moe_init_routing(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int):
    """Rows of `x` in the order of their experts, where each (token, choice) went, and the sorted experts.

    `row_idx` [tokens, k] numbers the entries by columns: entry i belongs to token i modulo tokens.
    """
    tokens, k = expert_idx.shape
    experts, order = expert_idx.flatten().sort(stable=True)
    entries = row_idx.flatten()[order].long()
    position = torch.empty(tokens * k, dtype=torch.int32)
    position[entries] = torch.arange(tokens * k, dtype=torch.int32)
    active = min(active_num, tokens) * k
    return x.index_select(0, entries[:active] % tokens), position, experts.to(torch.int32)


@operator(
    "npu_moe_compute_expert_tokens(Tensor sorted_expert_for_source_row, int num_expert) -> Tensor",
    shapes=lambda sorted_experts, num_expert: sorted_experts.new_empty(num_expert, dtype=torch.int32),
)
def npu_moe_compute_expert_tokens(sorted_experts: Tensor, num_expert: int):
    """Running totals of the tokens of each expert, int32."""
    return torch.bincount(sorted_experts, minlength=num_expert)[:num_expert].cumsum(0).to(torch.int32)


@operator(
    "npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, Tensor? "
    "scales, Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0) -> Tensor"
)
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int = 0,
):
    """The weighted sum, for each token, of the rows of its experts, computed in float32 and rounded once.

    In modes 0 and 1 the positions of rows are numbered by columns, in modes 2 and 3 by tokens. Modes 1 and 3 pad: a
    position of -1 stands for a dropped row.
    """
    shaped = export_for_source_row if export_for_source_row is not None else scales
    tokens, k = (expanded_src_to_dst_row.numel(), 1) if shaped is None else shaped.shape
    position = expanded_src_to_dst_row.long()
    position = position.view(k, tokens).t() if drop_pad_mode in (0, 1) else position.view(tokens, k)
    rows = expanded_permuted_rows.flatten(0, -2)[position.clamp(min=0)].float()
    if drop_pad_mode in (1, 3):
        rows = rows.masked_fill((position < 0).unsqueeze(-1), 0)
    if bias is not None:
        rows = rows + bias[export_for_source_row.long()]
    if scales is not None:
        rows = rows * scales.float().unsqueeze(-1)
    total = rows.sum(1)
    for skip in (skip1, skip2):
        if skip is not None:
            total = total + skip
    return total.to(expanded_permuted_rows.dtype)


@operator(
    "npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) "
    "-> (Tensor, Tensor)",
    differentiable=True,
)
def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
):
    """Tokens in the order of their experts, and for each (token, choice) the row that it went to, int32."""
    if padded_mode:
        raise NotImplementedError("npu_moe_token_permute: padded_mode is not emulated")
    k = 1 if indices.dim() == 1 else indices.shape[1]
    order = indices.flatten().argsort(stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel())
    # 0 keeps all; a negative number leaves that many out.
    kept = order[:num_out_tokens] if num_out_tokens else order
    return tokens.index_select(0, kept // k), position.to(torch.int32)


@operator(
    "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool "
    "padded_mode=False, int[]? restore_shape=None) -> Tensor",
    differentiable=True,
)
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
):
    """The inverse of npu_moe_token_permute: the sum, weighted by `probs`, of the rows of each token.

    It is computed in float32 and rounded once.
    """
    if padded_mode:
        raise NotImplementedError("npu_moe_token_unpermute: padded_mode is not emulated")
    k = 1 if probs is None else probs.shape[1]
    missing = sorted_indices.numel() - permuted_tokens.shape[0]
    if missing > 0:
        permuted_tokens = torch.nn.functional.pad(permuted_tokens, (0, 0, 0, missing))
    rows = permuted_tokens.index_select(0, sorted_indices.long()).unflatten(0, (-1, k))
    if probs is None:
        return rows.squeeze(1)
    return (rows.float() * probs.float().unsqueeze(-1)).sum(1).to(permuted_tokens.dtype)
