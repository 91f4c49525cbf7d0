"""Products with a collective inside, on four ranks, against the same with whole tensors on the CPU in float64."""

import torch
import torch.distributed as dist
import torch_npu
from torch import Tensor
from torch.autograd import Function

from npu_emulator import strict
from npu_emulator.operators import exposed
from tests.npu_emulator.expert_exchange_checks import raises

KERNELS = exposed("npu_extension")
ROWS, INNER, COLUMNS = 3, 5, 4


def name_of(ranks, group=None) -> str:
    return (group or dist.group.WORLD)._get_backend(ranks.device).get_hccl_comm_name(ranks.rank)


def of_all(ranks, *shape, seed: int = 0) -> list[Tensor]:
    """A tensor for each rank, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(ranks.size)]


def put(ranks, tensors: list[Tensor]) -> Tensor:
    return tensors[ranks.rank].float().to(ranks.device)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.detach().cpu().double(), expected, rtol=1e-5, atol=1e-5)


def rows_are_gathered_before_the_product(ranks):
    parts, weights = of_all(ranks, ROWS, INNER), of_all(ranks, INNER, COLUMNS, seed=1)
    bias = of_all(ranks, COLUMNS, seed=2)
    call = (put(ranks, parts), put(ranks, weights), name_of(ranks), ranks.size)
    product, gathered = torch_npu.npu_all_gather_base_mm(*call, bias=put(ranks, bias))
    close(product, torch.cat(parts) @ weights[ranks.rank] + bias[ranks.rank])
    close(gathered, torch.cat(parts))
    product, nothing = torch_npu.npu_all_gather_base_mm(*call, gather_output=False)
    close(product, torch.cat(parts) @ weights[ranks.rank])
    assert nothing.numel() == 0


def products_are_summed_and_scattered_or_given_to_all(ranks):
    parts, weights = of_all(ranks, ROWS * ranks.size, INNER), of_all(ranks, INNER, COLUMNS, seed=1)
    bias = of_all(ranks, COLUMNS, seed=2)
    own = put(ranks, parts), put(ranks, weights), name_of(ranks)
    total = sum(part @ weight + one for part, weight, one in zip(parts, weights, bias, strict=True))
    scattered = torch_npu.npu_mm_reduce_scatter_base(*own, ranks.size, bias=put(ranks, bias))
    close(scattered, total.chunk(ranks.size)[ranks.rank])
    close(torch_npu.npu_mm_all_reduce_base(*own, bias=put(ranks, bias)), total)
    others = of_all(ranks, ROWS * ranks.size, COLUMNS, seed=3)
    batched = torch_npu.npu_mm_all_reduce_base(own[0].unsqueeze(0), *own[1:], x3=put(ranks, others).unsqueeze(0))
    close(batched[0], total - sum(bias) + sum(others))


class Column(Function):
    """A column-parallel layer under sequence parallelism, as training code writes it with these operators."""

    @staticmethod
    def forward(ctx, x, weight, name, size):
        output, ctx.gathered = torch_npu.npu_all_gather_base_mm(x, weight.t(), name, size)
        ctx.weight, ctx.group = weight, (name, size)
        return output

    @staticmethod
    def backward(ctx, gradient):
        of_x = torch_npu.npu_mm_reduce_scatter_base(gradient, ctx.weight, *ctx.group)
        return of_x, gradient.t() @ ctx.gathered, None, None


class Row(Function):
    @staticmethod
    def forward(ctx, x, weight, name, size):
        ctx.saved, ctx.group = (x, weight), (name, size)
        return torch_npu.npu_mm_reduce_scatter_base(x, weight.t(), name, size)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved
        of_x, gathered = torch_npu.npu_all_gather_base_mm(gradient, weight, *ctx.group)
        return of_x, gathered.t() @ x, None, None


def layers_of_sequence_parallelism_have_the_gradients_of_whole_layers(ranks):
    parts = [part.requires_grad_() for part in of_all(ranks, ROWS, INNER)]
    up = [part.requires_grad_() for part in of_all(ranks, COLUMNS, INNER, seed=1)]
    down = [part.requires_grad_() for part in of_all(ranks, INNER, COLUMNS, seed=2)]
    hidden = torch.nn.functional.silu(torch.cat(parts) @ torch.cat(up).t())
    whole = hidden @ torch.cat(down, 1).t()
    whole.square().sum().backward()

    own = [put(ranks, [one.detach() for one in tensors]).requires_grad_() for tensors in (parts, up, down)]
    group = (name_of(ranks), ranks.size)
    out = Row.apply(torch.nn.functional.silu(Column.apply(own[0], own[1], *group)), own[2], *group)
    out.square().sum().backward()
    close(out, whole.detach().chunk(ranks.size)[ranks.rank])
    for mine, tensors in zip(own, (parts, up, down), strict=True):
        close(mine.grad, tensors[ranks.rank].grad)


def kernels_of_lcoc_work_in_each_domain(ranks):
    """Two domains of two ranks each; the right matrix as it is and transposed; the bias is added once."""
    size, domain, rank = 2, ranks.rank // 2, ranks.rank % 2
    members = range(2 * domain, 2 * domain + 2)
    x, weights = of_all(ranks, 2 * ROWS, INNER), of_all(ranks, INNER, COLUMNS, seed=1)
    bias, place = of_all(ranks, 1, COLUMNS, seed=2), (rank, size, str(domain))
    gathered, total = torch.cat([x[other] for other in members]), sum(x[other] @ weights[other] for other in members)
    expected = {
        "matmul_all_reduce": total,
        "all_gather_matmul": gathered @ weights[ranks.rank],
        "matmul_reduce_scatter": total.chunk(size)[rank],
    }
    for right in (put(ranks, weights), put(ranks, weights).t().contiguous()):
        for name, product in expected.items():
            for given, added in ((put(ranks, bias), bias[ranks.rank]), (None, 0)):
                output = torch.full(product.shape, torch.nan, device=ranks.device)
                KERNELS[name](put(ranks, x), right, given, output, *place)
                close(output, product + added)
        output, rows = torch.empty(4 * ROWS, COLUMNS, device=ranks.device), torch.empty(4 * ROWS, INNER, device="npu")
        KERNELS["all_gather_matmul_v2"](put(ranks, x), right, None, output, rows, *place)
        close(output, expected["all_gather_matmul"])
        close(rows, gathered)


class Experts:
    """Experts spread over two ranks and split over two, as the two kernels with exchanged rows take them."""

    experts, tokens, hidden, middle = 4, 4, 6, 5

    def __init__(self, ranks):
        groups = {kind: [dist.new_group(pair) for pair in pairs] for kind, pairs in self.pairs.items()}
        self.ranks, self.expert_rank, self.tensor_rank = ranks, *divmod(ranks.rank, 2)
        mine = {"expert": groups["expert"][self.tensor_rank], "tensor": groups["tensor"][self.expert_rank]}
        self.groups = (name_of(ranks, mine["expert"]), 2, name_of(ranks, mine["tensor"]), 2)
        self.own_experts = range(2 * self.expert_rank, 2 * self.expert_rank + 2)

    pairs = {"tensor": ([0, 1], [2, 3]), "expert": ([0, 2], [1, 3])}

    def source(self, x: list[Tensor], sender: int, expert: int, shard: int) -> Tensor:
        """What one rank of the expert group, all of its tensor group together, sends to an expert."""
        return torch.cat([x[2 * sender + part][expert] for part in range(2)], 0 if shard else 1)


def rows_go_to_experts_and_products_come_back(ranks):
    case = Experts(ranks)
    act = {0: lambda x: x, 2: torch.nn.functional.silu, 3: torch.relu, 4: lambda x: x * torch.sigmoid(1.702 * x)}
    for shard in (0, 1):
        shape = (case.tokens, case.hidden // 2) if shard == 0 else (case.tokens // 2, case.hidden)
        x, up = of_all(ranks, case.experts, *shape), of_all(ranks, 2, case.hidden, case.middle, seed=1)
        bias = of_all(ranks, 2, case.middle, seed=2)
        rows = [
            torch.cat([case.source(x, sender, expert, shard) for sender in range(2)]) for expert in case.own_experts
        ]
        products = [
            part @ weight + one for part, weight, one in zip(rows, up[ranks.rank], bias[ranks.rank], strict=True)
        ]
        for kind, activate in act.items():
            got, gathered, before = KERNELS["npu_alltoall_allgather_bmm"](
                put(ranks, x), put(ranks, up), put(ranks, bias), *case.groups, shard, kind, True, True
            )
            close(got, activate(torch.stack(products)))
            close(gathered, torch.stack(rows))
            assert before.numel() == 0 if kind == 0 else not close(before, torch.stack(products))
        bare = KERNELS["npu_alltoall_allgather_bmm"](
            put(ranks, x), put(ranks, up), None, *case.groups, shard, 0, False, False
        )
        close(bare[0], torch.stack(products) - bias[ranks.rank].unsqueeze(1))
        assert bare[1].numel() == bare[2].numel() == 0


def sums_of_the_tensor_group_come_back_to_their_senders(ranks):
    case = Experts(ranks)
    for shard in (0, 1):
        y = of_all(ranks, 2, 2 * case.tokens, case.middle)
        down = of_all(ranks, 2, case.middle, case.hidden, seed=1)
        columns = case.hidden // 2 if shard == 0 else case.hidden
        bias = of_all(ranks, 2, 1, columns, seed=2)
        out = KERNELS["npu_bmm_reducescatter_alltoall"](
            put(ranks, y), put(ranks, down), put(ranks, bias), *case.groups, shard
        )
        expected = []
        for expert in range(case.experts):
            owner, local = divmod(expert, 2)
            holders = [2 * owner + part for part in range(2)]
            summed = sum(y[holder][local] @ down[holder][local] for holder in holders)
            mine = summed.chunk(2)[case.expert_rank].chunk(2, 0 if shard else 1)[case.tensor_rank]
            expected.append(mine + bias[2 * owner + case.tensor_rank][local])
        close(out, torch.stack(expected))


def what_products_with_a_collective_refuse(ranks):
    x = torch.ones(ranks.size, 256, device=ranks.device, dtype=torch.bfloat16)
    weight, name = torch.ones(256, 3, device=ranks.device, dtype=torch.bfloat16), name_of(ranks)

    def gather(left=x, group=name, **options):
        return torch_npu.npu_all_gather_base_mm(left, weight, group, 4, **options)

    def scatter(left=x, world_size=4):
        return torch_npu.npu_mm_reduce_scatter_base(left, weight, name, world_size)

    def reduce(right=weight, **options):
        return torch_npu.npu_mm_all_reduce_base(x, right, name, **options)

    raises(NotImplementedError, "gather_index", lambda: gather(gather_index=1))
    raises(RuntimeError, "no communicator", lambda: gather(group="nobody"))
    raises(RuntimeError, "not world_size=2", lambda: scatter(world_size=2))
    raises(RuntimeError, "cannot be divided", lambda: scatter(x[:3]))
    raises(RuntimeError, "must be 'sum'", lambda: reduce(reduce_op="max"))
    raises(NotImplementedError, "pertoken_scale", lambda: reduce(pertoken_scale=x))
    forbidden = {
        "npu_all_gather_base_mm: x must have 256 to": lambda: gather(x[:, :255].contiguous()),
        "bias must be zero": lambda: gather(bias=weight[0]),
        "comm_turn must be one of 0": lambda: reduce(comm_turn=1),
        "x must not be transposed": lambda: scatter(x.t().contiguous().t()),
        "x must have rows for every rank": lambda: scatter(x[:3]),
        "x2 must have the dtype of x": lambda: reduce(weight.half()),
    }
    with strict.enabled():
        for text, call in forbidden.items():
            raises(strict.ForbiddenInput, text, call)
        close(gather(bias=torch.zeros_like(weight[0]))[0], torch.full((4 * ranks.size, 3), 256.0).double())


CHECKS = [
    rows_are_gathered_before_the_product,
    products_are_summed_and_scattered_or_given_to_all,
    layers_of_sequence_parallelism_have_the_gradients_of_whole_layers,
    kernels_of_lcoc_work_in_each_domain,
    rows_go_to_experts_and_products_come_back,
    sums_of_the_tensor_group_come_back_to_their_senders,
    what_products_with_a_collective_refuse,
]
