"""MC2: sending tokens to the ranks of their experts, and the experts' outputs back, each as one operator.

`npu_moe_distribute_dispatch` and `npu_moe_distribute_combine` name their group by its HCCL communicator. The rows that
a rank gets are in the order of its experts, and for each expert in the order of ranks and of their tokens.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from .communicators import find_group
from .registry import operator

_INFO = 3  # rank, token and choice of a row, as in the kernel of Atlas A3
_INFO_ROOM = 128  # numbers of assist_info_for_combine for each row of expand_x
_NOT_A_NUMBER = float("nan")


def _refuse(name: str, others: dict) -> None:
    """Raise NotImplementedError for quantisation, experts shared by all tokens and tensor parallel groups."""
    neutral = {"tp_world_size": (0, 1), "shared_expert_num": (0, 1), "comm_alg": ("",)}
    # Means nothing without a tensor parallel group.
    ignored = ("group_tp", "tp_rank_id", "tp_send_counts", "expert_shard_type", "expert_scales", "expand_scales")
    for argument, value in others.items():
        if argument in ignored or value is None:
            continue
        if isinstance(value, Tensor) or value not in neutral.get(argument, (0,)):
            raise NotImplementedError(f"{name}: {argument} is not emulated")


def _active_entries(expert_ids: Tensor, active: Tensor | None) -> Tensor:
    """Numbers of the (token, choice) pairs that take part, in the order of their experts, then of the tokens."""
    experts = expert_ids.flatten()
    order = experts.argsort(stable=True)
    return order if active is None else order[active.repeat_interleave(expert_ids.shape[1])[order]]


def _exchange(group: dist.ProcessGroup, rows: Tensor, sent: Tensor, received: Tensor) -> Tensor:
    """Rows for rank 0, rank 1, and so on, as many as `sent` says, for those of the others to this rank."""
    counts = received.tolist()
    got = rows.new_empty(sum(counts), *rows.shape[1:])
    dist.all_to_all_single(got, rows.contiguous(), counts, sent.tolist(), group=group)
    return got


def _most_rows(expert_ids: Tensor, ranks: int, experts: int, global_bs: int) -> int:
    """Rows that a rank can get at most: what the kernel makes room for."""
    tokens, k = expert_ids.shape
    return (global_bs or tokens * ranks) * min(experts // ranks, k)


def _dispatch_shapes(version: int, x, expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, **options):
    most = _most_rows(expert_ids, ep_world_size, moe_expert_num, options.get("global_bs", 0))
    local = moe_expert_num // ep_world_size
    numbers = expert_ids.new_empty
    return (
        x.new_empty(most, x.shape[1]),
        x.new_empty(0, dtype=torch.float32),
        numbers(expert_ids.numel() if version == 1 else most * _INFO_ROOM, dtype=torch.int32),
        numbers(local, dtype=torch.int64),
        numbers(local * ep_world_size, dtype=torch.int32),
        numbers(1, dtype=torch.int32),
        x.new_empty(0, dtype=torch.float32),
    )


def _dispatch(
    version: int,
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: Tensor | None = None,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    **others,
) -> tuple[Tensor, ...]:
    """Sends each active token to the ranks of its experts, which hold equal consecutive parts of all experts.

    Returns the rows that this rank gets, not a number where there is room left; nothing; for the combination, the
    number of each (token, choice) among the rows that this rank sends to its expert (version 1), or rank, token and
    choice of each row (version 2); the rows of each expert of this rank (or their running totals, with
    `expert_token_nums_type` 0); running totals of the rows by expert, then rank; and twice nothing.
    """
    _refuse(f"npu_moe_distribute_dispatch{'_v2' if version == 2 else ''}", others)
    group, k = find_group(group_ep, ep_rank_id), expert_ids.shape[1]
    entries = _active_entries(expert_ids, x_active_mask)
    experts = expert_ids.flatten()[entries].long()
    sent = torch.bincount(experts, minlength=moe_expert_num).view(ep_world_size, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    token, choice = entries // k, entries % k
    sizes = (sent.sum(1), received.sum(1))
    rows = _exchange(group, x[token], *sizes)
    origins = torch.stack((torch.full_like(token, ep_rank_id), token, choice), -1).int()
    origins = _exchange(group, origins, *sizes)

    local = received.shape[1]
    expert_of_row = torch.arange(local, device=x.device).repeat(ep_world_size).repeat_interleave(received.flatten())
    by_expert = expert_of_row.argsort(stable=True)
    results = _empty_results(version, x, expert_ids, ep_world_size, moe_expert_num, global_bs)
    expanded, info = results[0], results[2]
    if rows.shape[0] > expanded.shape[0]:
        raise RuntimeError(f"npu_moe_distribute_dispatch: {rows.shape[0]} rows do not fit: global_bs is too small")
    expanded[: rows.shape[0]] = rows[by_expert]
    if version == 1:
        starts = sent.flatten().cumsum(0) - sent.flatten()
        info[entries] = (torch.arange(entries.numel(), device=x.device) - starts[experts]).int()
    else:
        info[: _INFO * rows.shape[0]] = origins[by_expert].flatten()
    totals = received.sum(0)
    results[3].copy_(totals if expert_token_nums_type else totals.cumsum(0))
    results[4].copy_(received.t().flatten().cumsum(0))
    return results


def _empty_results(version: int, x: Tensor, expert_ids: Tensor, ranks: int, experts: int, global_bs: int):
    results = _dispatch_shapes(version, x, expert_ids, "", ranks, 0, experts, global_bs=global_bs)
    results[0].fill_(_NOT_A_NUMBER)
    for numbers in (results[2], results[5]):
        numbers.zero_()
    return results


def _combine_shapes(expand_x: Tensor, expert_ids: Tensor, *_, **__) -> Tensor:
    return expand_x.new_empty(expert_ids.shape[0], expand_x.shape[1])


def _weighted_sum(rows: Tensor, places: Tensor, scales: Tensor) -> Tensor:
    """For each token, the sum of its rows, which lie at `places` of all (token, choice) pairs, by their weights."""
    choices = rows.new_zeros(scales.numel(), rows.shape[1], dtype=torch.float32)
    choices[places] = rows.float()
    return (choices.view(*scales.shape, -1) * scales.float().unsqueeze(-1)).sum(1).to(rows.dtype)


_DISPATCH_OPTIONS = (
    "Tensor x, Tensor expert_ids, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, Tensor? "
    "scales=None, Tensor? x_active_mask=None, Tensor? expert_scales=None, str group_tp='', int tp_world_size=0, int "
    "tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0, int quant_mode=0, "
    "SymInt global_bs=0, int expert_token_nums_type=1"
)
_COMBINE_OPTIONS = (
    "str group_tp='', int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1, int "
    "shared_expert_rank_num=0, SymInt global_bs=0"
)
_SEVEN = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


@operator(
    f"npu_moe_distribute_dispatch({_DISPATCH_OPTIONS}) -> {_SEVEN}",
    shapes=functools.partial(_dispatch_shapes, 1),
    on_device=True,
)
def npu_moe_distribute_dispatch(
    x: Tensor, expert_ids: Tensor, group_ep: str, ep_world_size: int, ep_rank_id: int, moe_expert_num: int, **options
):
    return _dispatch(1, x, expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, **options)


@operator(
    f"npu_moe_distribute_dispatch_v2({_DISPATCH_OPTIONS}, str comm_alg='') -> {_SEVEN}",
    shapes=functools.partial(_dispatch_shapes, 2),
    on_device=True,
)
def npu_moe_distribute_dispatch_v2(
    x: Tensor, expert_ids: Tensor, group_ep: str, ep_world_size: int, ep_rank_id: int, moe_expert_num: int, **options
):
    return _dispatch(2, x, expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, **options)


@operator(
    "npu_moe_distribute_combine(Tensor expand_x, Tensor expert_ids, Tensor expand_idx, Tensor ep_send_counts, Tensor "
    "expert_scales, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, Tensor? "
    "tp_send_counts=None, Tensor? x_active_mask=None, Tensor? activation_scale=None, Tensor? weight_scale=None, "
    f"Tensor? group_list=None, Tensor? expand_scales=None, {_COMBINE_OPTIONS}, int out_dtype=0, int "
    "comm_quant_mode=0, int group_list_type=0) -> Tensor",
    shapes=_combine_shapes,
    on_device=True,
)
def npu_moe_distribute_combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: Tensor | None = None,
    global_bs: int = 0,
    **others,
):
    """The way back: for each token the sum of its experts' outputs by `expert_scales`, float32, [tokens, size].

    Tokens that are not active give zeros.
    """
    _refuse("npu_moe_distribute_combine", others)
    group = find_group(group_ep, ep_rank_id)
    held = ep_send_counts.long().diff(prepend=ep_send_counts.new_zeros(1).long())
    rank_of_row = torch.arange(ep_world_size, device=held.device).repeat(held.numel() // ep_world_size)
    by_rank = rank_of_row.repeat_interleave(held).argsort(stable=True)
    entries = _active_entries(expert_ids, x_active_mask)
    experts = expert_ids.flatten()[entries].long()
    sent = torch.bincount(experts, minlength=moe_expert_num)
    sizes = (held.view(-1, ep_world_size).sum(0), sent.view(ep_world_size, -1).sum(1))
    rows = _exchange(group, expand_x[by_rank], *sizes)
    places = (sent.cumsum(0) - sent)[experts] + expand_idx[entries]
    return _weighted_sum(rows[places], entries, expert_scales)


@operator(
    "npu_moe_distribute_combine_v2(Tensor expand_x, Tensor expert_ids, Tensor assist_info_for_combine, Tensor "
    "ep_send_counts, Tensor expert_scales, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, "
    "Tensor? tp_send_counts=None, Tensor? x_active_mask=None, Tensor? expand_scales=None, Tensor? "
    f"shared_expert_x=None, {_COMBINE_OPTIONS}, int comm_quant_mode=0, str comm_alg='') -> Tensor",
    shapes=_combine_shapes,
    on_device=True,
)
def npu_moe_distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: Tensor | None = None,
    global_bs: int = 0,
    **others,
):
    """As npu_moe_distribute_combine; where each row belongs is told by `assist_info_for_combine`."""
    _refuse("npu_moe_distribute_combine_v2", others)
    group, held = find_group(group_ep, ep_rank_id), int(ep_send_counts[-1])
    origins = assist_info_for_combine[: _INFO * held].view(held, _INFO).long()
    by_rank = origins[:, 0].argsort(stable=True)
    sent = torch.bincount(origins[:, 0], minlength=ep_world_size)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    rows = _exchange(group, expand_x[by_rank], sent, received)
    pairs = _exchange(group, origins[by_rank, 1] * expert_ids.shape[1] + origins[by_rank, 2], sent, received)
    return _weighted_sum(rows, pairs, expert_scales)
