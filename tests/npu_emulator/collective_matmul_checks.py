"""Products with a collective inside, on four ranks, against the same with whole tensors on the CPU in float64."""

import torch
import torch.distributed as dist
import torch_npu
from torch import Tensor
from torch.autograd import Function

from tests.npu_emulator.expert_exchange_checks import raises

ROWS, INNER, COLUMNS = 3, 5, 4


def name_of(ranks, group=None) -> str:
    return (group or dist.group.WORLD)._get_backend(ranks.device).get_hccl_comm_name(ranks.rank)


def of_all(ranks, *shape, seed: int = 0) -> list[Tensor]:
    """Draw a tensor for each rank; every rank draws the same ones."""
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


def whole_numbers(ranks, *shape, seed: int = 0) -> list[Tensor]:
    """Draw an int8 tensor for each rank; every rank draws the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 10, shape, generator=generator, dtype=torch.int8) for _ in range(ranks.size)]


def quantised_products_are_summed(ranks):
    """Tokens have 8 bits, with scales for columns and for rows; or weights alone do, with scales for 32 rows each.

    Scales are powers of two and offsets are integers, so that ranks round nothing before the sum.
    """
    device, name = ranks.device, name_of(ranks)
    xs, weights = whole_numbers(ranks, 3, 64), whole_numbers(ranks, 64, COLUMNS, seed=1)
    x, weight = xs[ranks.rank].to(device), weights[ranks.rank].to(device)
    columns, rows = torch.tensor([0.5, 0.25, 1, 2]), torch.tensor([1, 0.5, 0.25])
    bias, added = torch.arange(COLUMNS, dtype=torch.int32), torch.arange(3.0 * COLUMNS).view(3, COLUMNS)
    sums = [left.double() @ right.double() for left, right in zip(xs, weights, strict=True)]

    scale = columns.bfloat16().to(device)
    given = torch_npu.npu_mm_all_reduce_base(x, weight, name, dequant_scale=scale, bias=bias.to(device))
    expected = sum(((one + bias) * columns).bfloat16().double() for one in sums)
    assert torch.equal(given.cpu(), expected.bfloat16())
    options = {"dequant_scale": columns.to(device), "pertoken_scale": rows.to(device)}
    given = torch_npu.npu_mm_all_reduce_base(x, weight, name, x3=added.half().to(device), **options)
    expected = sum((one * columns * rows.unsqueeze(1)).half().double() + added for one in sums)
    assert torch.equal(given.cpu(), expected.half())

    groups = torch.tensor([[0.5, 1, 2, 0.25], [1, 0.5, 0.25, 2]])
    offsets = torch.tensor([[1.0, -2, 0, 3], [-1, 4, 2, 0]])
    options = {"antiquant_scale": groups.half().to(device), "antiquant_offset": offsets.half().to(device)}
    given = torch_npu.npu_mm_all_reduce_base(x.half(), weight, name, antiquant_group_size=32, **options)
    of_rows = [each.double().repeat_interleave(32, 0) for each in (groups, offsets)]
    products = [left.double() @ ((right + of_rows[1]) * of_rows[0]) for left, right in zip(xs, weights, strict=True)]
    assert torch.equal(given.cpu(), sum(one.half().double() for one in products).half())


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


def what_products_with_a_collective_refuse(ranks):
    x = torch.ones(ranks.size, 256, device=ranks.device, dtype=torch.bfloat16)
    weight, name = torch.ones(256, 3, device=ranks.device, dtype=torch.bfloat16), name_of(ranks)

    def gather(left=x, group=name, **options):
        return torch_npu.npu_all_gather_base_mm(left, weight, group, ranks.size, **options)

    def scatter(left=x, world_size=ranks.size):
        return torch_npu.npu_mm_reduce_scatter_base(left, weight, name, world_size)

    def reduce(left=x, **options):
        return torch_npu.npu_mm_all_reduce_base(left, weight, name, **options)

    raises("gatherIndex must be 0, but got 1", gather, gather_index=1)
    raises("no communicator nobody in this process", gather, group="nobody")
    raises("reduceOp must be sum, but got max", reduce, reduce_op="max")
    raises("The M-axis in input of Matmul should be be divisible by world_size", scatter, x[:3])
    raises("world_size should be in [2, 4, 8, 16, 32]", scatter, world_size=3)
    raises("4 rows for 4 ranks of the communicator do not divide into 2 for each", scatter, world_size=2)
    scales = torch.ones(ranks.size, device=ranks.device)
    raises("dequantScale shoulden't be null", reduce, pertoken_scale=scales)
    close(gather()[0], torch.full((ranks.size**2, 3), 256.0).double())


def what_documents_of_products_with_a_collective_forbid(ranks):
    """Strict mode rejects it; the checks above give operators float32 without that mode."""
    x = torch.ones(ranks.size, 256, device=ranks.device)
    weight, group = torch.ones(256, 3, device=ranks.device), (name_of(ranks), ranks.size)
    transposed, half = x.half().t().contiguous().t(), weight.half()
    refused = "Tensor x1 not implemented for DT_FLOAT"
    raises(refused, torch_npu.npu_all_gather_base_mm, x, weight, *group)
    raises(refused, torch_npu.npu_mm_reduce_scatter_base, x, weight, *group)
    raises(refused, torch_npu.npu_mm_all_reduce_base, x, weight, group[0])
    raises("Tensor x1 must be contiguous", torch_npu.npu_mm_all_reduce_base, transposed, half, group[0])
    summed = torch_npu.npu_mm_all_reduce_base(x.half(), half, group[0])
    close(summed, torch.full((ranks.size, 3), 256.0 * ranks.size).double())


CHECKS = [
    rows_are_gathered_before_the_product,
    products_are_summed_and_scattered_or_given_to_all,
    quantised_products_are_summed,
    layers_of_sequence_parallelism_have_the_gradients_of_whole_layers,
]
REFUSALS = [what_products_with_a_collective_refuse, what_documents_of_products_with_a_collective_forbid]
