"""Matrix products that share a kernel with a collective of a tensor or expert parallel group.

The products are computed in the type of the inputs and handed to hccl, so sums over ranks round as those of hccl do.
Gradients are left to the caller, as by torch_npu.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from .communicators import find_group, meet_in_domain
from .registry import operator

_EXTENSION = "npu_extension"
_ACTIVATIONS = {
    0: lambda x: x,
    2: functional.silu,
    3: functional.relu,
    4: lambda x: x * torch.sigmoid(1.702 * x),
}


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks one after another along the first dimension."""
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part along the first dimension of the sum over ranks."""
    if x.shape[0] % group.size():
        raise RuntimeError(f"{x.shape[0]} rows cannot be divided among {group.size()} ranks")
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
    return part


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x @ weight
    return product if bias is None else product + bias


def _group_of(name: str, world_size: int) -> dist.ProcessGroup:
    group = find_group(name)
    if group.size() != world_size:
        raise RuntimeError(f"the communicator {name!r} has {group.size()} ranks, not world_size={world_size}")
    return group


def _all_gather_shapes(x: Tensor, x2: Tensor, hcom: str, world_size: int, **options) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] * world_size
    gathered = x.new_empty((rows, x.shape[1]) if options.get("gather_output", True) else (0,))
    return x.new_empty(rows, x2.shape[1]), gathered


@operator(
    "npu_all_gather_base_mm(Tensor self, Tensor x2, str hcom, int world_size, *, Tensor? bias=None, int gather_index=0,"
    " bool gather_output=True, int comm_turn=0) -> (Tensor, Tensor)",
    shapes=_all_gather_shapes,
    on_device=True,
)
def npu_all_gather_base_mm(
    x: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    bias: Tensor | None = None,
    gather_index: int = 0,
    gather_output: bool = True,
    comm_turn: int = 0,
):
    """The rows [m, k] of all ranks times `x2` [k, n], plus bias: [m * world_size, n]; and these rows, or nothing.

    Page: torch_npu.npu_all_gather_base_mm.
    """
    if gather_index:
        raise NotImplementedError("npu_all_gather_base_mm: gather_index other than 0 is not supported by any version")
    rows = _gathered(x, _group_of(hcom, world_size))
    return _product(rows, x2, bias), rows if gather_output else x.new_empty(0)


@operator(
    "npu_mm_reduce_scatter_base(Tensor self, Tensor x2, str hcom, int world_size, *, str reduce_op='sum', "
    "Tensor? bias=None, int comm_turn=0) -> Tensor",
    shapes=lambda x, x2, hcom, world_size, **_: x.new_empty(x.shape[0] // world_size, x2.shape[1]),
    on_device=True,
)
def npu_mm_reduce_scatter_base(
    x: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    comm_turn: int = 0,
):
    """This rank's rows [m / world_size, n] of the sum over ranks of ``x @ x2 + bias``.

    Page: torch_npu.npu_mm_reduce_scatter_base.
    """
    if reduce_op != "sum":
        raise RuntimeError(f"npu_mm_reduce_scatter_base: reduce_op must be 'sum', not {reduce_op!r}")
    return _scattered(_product(x, x2, bias), _group_of(hcom, world_size))


@operator(
    "npu_mm_all_reduce_base(Tensor x1, Tensor x2, str hcom, *, str reduce_op='sum', Tensor? bias=None, Tensor? "
    "antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? x3=None, Tensor? dequant_scale=None, Tensor? "
    "pertoken_scale=None, Tensor? comm_quant_scale_1=None, Tensor? comm_quant_scale_2=None, int comm_turn=0, int "
    "antiquant_group_size=0) -> Tensor",
    shapes=lambda x, x2, hcom, **_: x.new_empty(*x.shape[:-1], x2.shape[1]),
    on_device=True,
)
def npu_mm_all_reduce_base(
    x: Tensor,
    x2: Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    x3: Tensor | None = None,
    comm_turn: int = 0,
    **quantisation,
):
    """The sum over ranks of ``x1 @ x2 + bias + x3``; x1 has two or three dimensions.

    Page: torch_npu.npu_mm_all_reduce_base.
    """
    given = [name for name, value in quantisation.items() if isinstance(value, Tensor) or value]
    if given:
        raise NotImplementedError(f"npu_mm_all_reduce_base: {', '.join(given)} is not emulated")
    if reduce_op != "sum":
        raise RuntimeError(f"npu_mm_all_reduce_base: reduce_op must be 'sum', not {reduce_op!r}")
    total = _product(x, x2, bias)
    total = total if x3 is None else total + x3
    dist.all_reduce(total, group=find_group(hcom))
    return total


def _right(left: Tensor, right: Tensor) -> Tensor:
    """The right matrix as MindSpeed binds LCOC: [k, n], or [n, k] where that does not fit. A square one is [k, n]."""
    return right if left.shape[1] == right.shape[0] else right.t()


def _finish(output: Tensor, product: Tensor, bias: Tensor | None) -> None:
    output.copy_(product if bias is None else product + bias)


_LCOC = "Tensor? biasOpt, Tensor(a!) output"
_DOMAIN = "int rank, int rankSize, str commDomain) -> ()"


@operator(f"matmul_all_reduce(Tensor input1, Tensor input2, {_LCOC}, {_DOMAIN}", namespace=_EXTENSION, on_device=True)
def matmul_all_reduce(
    left: Tensor, right: Tensor, bias: Tensor | None, output: Tensor, rank: int, size: int, domain: str
):
    """ATB LinearParallel, LINEAR_ALL_REDUCE: the sum over ranks of the product, then the bias [1, n], once.

    Page: MindSpeed docs/ops/lcal_coc.md, as for the others of this kind here.
    """
    product = left @ _right(left, right)
    dist.all_reduce(product, group=meet_in_domain(domain, rank, size))
    _finish(output, product, bias)


@operator(f"all_gather_matmul(Tensor input1, Tensor input2, {_LCOC}, {_DOMAIN}", namespace=_EXTENSION, on_device=True)
def all_gather_matmul(
    left: Tensor, right: Tensor, bias: Tensor | None, output: Tensor, rank: int, size: int, domain: str
):
    """ATB LinearParallel, ALL_GATHER_LINEAR: the rows of all ranks times the right matrix, then the bias."""
    _finish(output, _gathered(left, meet_in_domain(domain, rank, size)) @ _right(left, right), bias)


@operator(
    f"all_gather_matmul_v2(Tensor input1, Tensor input2, {_LCOC}, Tensor(b!) commOutput, {_DOMAIN}",
    namespace=_EXTENSION,
    on_device=True,
)
def all_gather_matmul_v2(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    output: Tensor,
    gathered: Tensor,
    rank: int,
    size: int,
    domain: str,
):
    """As all_gather_matmul, and writes the gathered rows too."""
    gathered.copy_(_gathered(left, meet_in_domain(domain, rank, size)))
    _finish(output, gathered @ _right(left, right), bias)


@operator(
    f"matmul_reduce_scatter(Tensor input1, Tensor input2, {_LCOC}, {_DOMAIN}", namespace=_EXTENSION, on_device=True
)
def matmul_reduce_scatter(
    left: Tensor, right: Tensor, bias: Tensor | None, output: Tensor, rank: int, size: int, domain: str
):
    """ATB LinearParallel, LINEAR_REDUCE_SCATTER: this rank's rows of the sum of the products, then the bias."""
    _finish(output, _scattered(left @ _right(left, right), meet_in_domain(domain, rank, size)), bias)


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all of equal parts of the first dimension: [ranks, part, ...], one part from each rank."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received.unflatten(0, (group.size(), -1))


def _per_expert(bias: Tensor | None) -> Tensor | None:
    return bias.unsqueeze(1) if bias is not None and bias.dim() == 2 else bias


@operator(
    "npu_alltoall_allgather_bmm(Tensor x, Tensor weight, Tensor? bias, str group_ep, int group_ep_worldsize, str "
    "group_tp, int group_tp_worldsize, int shard_type, int act_type, bool need_allgather_out, bool "
    "need_activation_feature) -> (Tensor, Tensor, Tensor)",
    namespace=_EXTENSION,
    on_device=True,
)
def npu_alltoall_allgather_bmm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_ep: str,
    group_ep_worldsize: int,
    group_tp: str,
    group_tp_worldsize: int,
    shard_type: int,
    act_type: int,
    need_allgather_out: bool,
    need_activation_feature: bool,
):
    """Sends rows to the ranks of their experts, gathers them there, and multiplies them by the weight of each expert.

    `x` is [E, C, H/tp] with shard_type 0, [E, C/tp, H] with 1, `weight` [E/ep, H, M/tp]. Results: [E/ep, rows, M/tp]
    after the activation, the gathered rows [E/ep, rows, H] and the product before the activation, where asked for.
    The rows of an expert lie by rank of the expert group, within that by rank of the tensor group.
    Page: MindSpeed docs/ops/npu_all_to_all_all_gather_bmm.md.
    """
    if act_type not in _ACTIVATIONS:
        raise NotImplementedError(f"npu_alltoall_allgather_bmm: act_type {act_type} is not emulated")
    expert_group, tensor_group = _group_of(group_ep, group_ep_worldsize), _group_of(group_tp, group_tp_worldsize)
    own = _exchanged(x, expert_group).transpose(0, 1)  # [E/ep, ep, C, H]
    parts = _gathered(own.unsqueeze(0), tensor_group)  # [tp, E/ep, ep, C, H]
    if shard_type == 0:
        rows = parts.permute(1, 2, 3, 0, 4).flatten(3).flatten(1, 2)
    else:
        rows = parts.permute(1, 2, 0, 3, 4).flatten(1, 3)
    product = _product(rows, weight, _per_expert(bias)).to(x.dtype)
    nothing = x.new_empty(0)
    kept = product if need_activation_feature and act_type else nothing
    return _ACTIVATIONS[act_type](product), rows if need_allgather_out else nothing, kept


@operator(
    "npu_bmm_reducescatter_alltoall(Tensor x, Tensor weight, Tensor? bias, str group_ep, int group_ep_worldsize, str "
    "group_tp, int group_tp_worldsize, int shard_type) -> Tensor",
    namespace=_EXTENSION,
    on_device=True,
)
def npu_bmm_reducescatter_alltoall(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_ep: str,
    group_ep_worldsize: int,
    group_tp: str,
    group_tp_worldsize: int,
    shard_type: int,
):
    """The way back of npu_alltoall_allgather_bmm: products [E/ep, rows, H], summed over the tensor group.

    Each rank of the tensor group gets its part of the columns (shard_type 0) or of the rows (1), to which the bias is
    added, and of that the ranks of the expert group get what they sent: [E, C, H/tp] or [E, C/tp, H].
    Page: MindSpeed docs/ops/npu_bmm_reduce_scatter_all_to_all.md.
    """
    expert_group, tensor_group = _group_of(group_ep, group_ep_worldsize), _group_of(group_tp, group_tp_worldsize)
    sources = (x @ weight).unflatten(1, (group_ep_worldsize, -1))  # [E/ep, ep, rows, H]
    if shard_type == 0:
        parts = sources.unflatten(3, (group_tp_worldsize, -1)).permute(3, 0, 1, 2, 4)
    else:
        parts = sources.unflatten(2, (group_tp_worldsize, -1)).permute(2, 0, 1, 3, 4)
    own = _scattered(parts, tensor_group).squeeze(0)  # [E/ep, ep, C, H]
    if bias is not None:
        own = (own + _per_expert(bias).unsqueeze(1)).to(x.dtype)
    return _exchanged(own.transpose(0, 1).flatten(0, 1), expert_group).flatten(0, 1)
