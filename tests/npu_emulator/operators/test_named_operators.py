"""Operators that torch_npu asks CANN's older interface for, by name, against plain torch on the host."""

from collections.abc import Callable

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from tests.npu_emulator.operators.compare import assert_like_reference


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def compiled_operators():
    """In this mode torch_npu asks for all operators by name."""
    torch.npu.set_compile_mode(jit_compile=True)
    yield
    torch.npu.set_compile_mode(jit_compile=False)


def ones_and_minus_ones(packed: Tensor, rows: int) -> Tensor:
    """A bit after the other, from the lowest of each byte."""
    bits = [float(2 * (byte >> bit & 1) - 1) for byte in packed.tolist() for bit in range(8)]
    return torch.tensor(bits).view(rows, -1)


# name -> the operator, its reference, and what both are given.
CASES: dict[str, tuple[Callable, Callable, list[Tensor]]] = {
    "broadcast": (
        lambda x: torch_npu.npu_broadcast(x, (4, 3)),
        lambda x: x.expand(4, 3),
        [torch.randn(4, 1)],
    ),
    "largest, and where": (
        lambda x: torch.cat([part.float() for part in torch_npu.npu_max(x, 1)]),
        lambda x: torch.cat([part.float() for part in x.max(1)]),
        [torch.randint(9, (5, 7)).float()],
    ),
    "smallest, and where": (
        lambda x: torch.cat([part.float() for part in torch_npu.npu_min(x, 0, keepdim=True)]),
        lambda x: torch.cat([part.float() for part in x.min(0, keepdim=True)]),
        [torch.randint(9, (5, 7)).float()],
    ),
    "one hot": (
        lambda x: torch_npu.npu_one_hot(x, -1, 5, 2, -1),
        lambda x: functional.one_hot(x.long(), 5).float() * 3 - 1,
        [torch.tensor([[0, 4], [2, 2], [1, 3]], dtype=torch.int32)],
    ),
    "pad": (
        lambda x: torch_npu.npu_pad(x, (1, 2, 0, 3)),
        lambda x: functional.pad(x, (0, 3, 1, 2)),
        [torch.randn(2, 3)],
    ),
    "a part in steps": (
        lambda x: torch_npu.npu_indexing(x, [1, 0], [4, 6], [2, 3]),
        lambda x: x[1:4:2, 0:6:3],
        [torch.randn(5, 6)],
    ),
    "transposed, then another shape": (
        lambda x: torch_npu.npu_confusion_transpose(x, [0, 2, 1], [6, 4], True),
        lambda x: x.permute(0, 2, 1).reshape(6, 4),
        [torch.randn(2, 4, 3)],
    ),
    "another shape, then transposed": (
        lambda x: torch_npu.npu_confusion_transpose(x, [0, 2, 1], [2, 4, 3], False),
        lambda x: x.reshape(2, 4, 3).permute(0, 2, 1),
        [torch.randn(6, 4)],
    ),
    "transposed": (
        lambda x: torch_npu.npu_transpose(x, (2, 0, 1)),
        lambda x: x.permute(2, 0, 1),
        [torch.randn(2, 3, 4)],
    ),
    "product of batches": (
        lambda x, y: torch_npu.npu_bmmV2(x, y, []),
        torch.matmul,
        [torch.randn(2, 3, 4), torch.randn(2, 4, 5)],
    ),
    "product of batches that lie transposed": (
        lambda x, y: torch_npu.npu_bmmV2(x.transpose(1, 2), y.transpose(1, 2), []),
        lambda x, y: x.transpose(1, 2) @ y.transpose(1, 2),
        [torch.randn(2, 4, 3), torch.randn(2, 5, 4)],
    ),
    "linear": (
        torch_npu.npu_linear,
        functional.linear,
        [torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)],
    ),
    "signs": (
        lambda x: torch_npu.npu_sign_bits_unpack(x, 2, torch.float32),
        lambda x: ones_and_minus_ones(x, 2),
        [torch.tensor([159, 1, 128, 255], dtype=torch.uint8)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_torch(name):
    operator, reference, given = CASES[name]
    torch.testing.assert_close(operator(*(tensor.to("npu") for tensor in given)).cpu(), reference(*given))


GRADIENTS: dict[str, tuple[Callable, Callable, list[Tensor]]] = {
    "SiLU": (torch_npu.npu_silu, functional.silu, [torch.randn(3, 5)]),
    "mish": (torch_npu.npu_mish, functional.mish, [torch.randn(3, 5)]),
    "cross entropy": (
        lambda x: torch_npu.npu_softmax_cross_entropy_with_logits(x, torch.eye(5)[:3].to("npu")),
        lambda x: functional.cross_entropy(x, torch.arange(3), reduction="none"),
        [torch.randn(3, 5)],
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_results_and_gradients_are_those_of_torch(name):
    assert_like_reference(*GRADIENTS[name])


def test_wrong_result_detected():
    with pytest.raises(AssertionError):
        assert_like_reference(torch_npu.npu_silu, functional.mish, [torch.randn(3, 5)])


def repeated(x: Tensor) -> Tensor:
    """Rows of whole numbers, some of them equal, on the device of `x`."""
    return torch.tensor([[1.0, 1, 2], [0, 3, 3], [1, 1, 2], [1, 1, 2]]).to(x.device)


# Results of several tensors are compared one by one.
BY_NAME: dict[str, Callable] = {
    "product": torch.mm,
    "product of what lies transposed": lambda x, y: x @ y.t().contiguous().t(),
    "absolute values": lambda x, y: x.abs() @ y,
    "product and a vector": lambda x, y: torch.addmm(y[0], x, y),
    "difference": lambda x, y: x - 1.5,
    "sum": lambda x, y: x + x[0],
    "elementwise product": lambda x, y: x * x,
    "quotient": lambda x, y: x / x[0],
    "softmax": lambda x, y: x.softmax(0),
    "zeros": lambda x, y: torch.zeros_like(x),
    "another type": lambda x, y: x.half(),
    "comparisons": lambda x, y: (x == x[0], x != x[0], x > x[0], x >= x[0], x < x[0], x <= x[0]),
    "all of them": lambda x, y: (x > -9).all(0),
    "the largest": lambda x, y: x.amax((0, 1)),
    "places": lambda x, y: (x > 0).nonzero(),
    "what a mask selects": lambda x, y: x.masked_select(x > 0),
    "different values": lambda x, y: repeated(x).unique(True, True, True),
    "different values that follow each other": lambda x, y: repeated(x).unique_consecutive(True, True),
    "different rows": lambda x, y: repeated(x).unique(True, True, True, dim=0),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_operators_of_torch_may_be_asked_for_by_name(compiled_operators, name):
    one, other = torch.randn(3, 4), torch.randn(4, 5)
    got, expected = (BY_NAME[name](*given) for given in ((one.to("npu"), other.to("npu")), (one, other)))
    for ours, theirs in zip(*((each if isinstance(each, tuple) else (each,)) for each in (got, expected)), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def test_equality_of_tensors_may_be_asked_for_by_name(compiled_operators):
    x = torch.arange(4.0).to("npu")
    assert torch.equal(x, x * 1) and not torch.equal(x, x * 2)


def test_normal_numbers_that_are_asked_for_by_name_are_drawn_from_the_seed(compiled_operators):
    drawn = []
    for seed in (1, 1, 2):
        torch.npu.manual_seed(seed)
        drawn.append(torch.empty(10_000, device="npu").normal_(3, 2).cpu())
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert abs(drawn[0].mean() - 3) < 0.1 and abs(drawn[0].std() - 2) < 0.1


@pytest.mark.parametrize(("largest_norm", "shortened"), [(-1.0, 1.0), (2.0, 0.5), (8.0, 1.0)])
@pytest.mark.parametrize("of_mbart", [False, True])
def test_adam_of_bert(largest_norm, shortened, of_mbart):
    """The reference is the formula of the operator's document; the gradients' norm is 4."""
    weights, mean, square, gradient = (torch.randn(5) for _ in range(4))
    given = [weights.to("npu"), mean.to("npu"), square.abs().to("npu")]
    torch_npu.npu_bert_apply_adam(
        0.1, 0.9, 0.99, 1e-6, gradient.to("npu"), largest_norm, 4.0, 0.01, 0.03, int(of_mbart), out=tuple(given)
    )
    gradient = gradient * (1 if of_mbart else shortened)
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.99 * square.abs() + 0.01 * gradient**2
    step = (0.03 if of_mbart else 0.1) * mean / (square.sqrt() + 1e-6)
    expected = [weights - step - 0.1 * 0.01 * weights, mean, square]
    torch.testing.assert_close([each.cpu() for each in given], expected)


def test_what_is_finite_may_be_asked_for_by_name(compiled_operators):
    numbers = torch.tensor([1, float("inf"), float("nan"), 0])
    assert torch.isfinite(numbers.to("npu")).cpu().tolist() == [True, False, False, True]


def test_a_filled_tensor_may_be_asked_for_by_name(compiled_operators):
    assert torch.empty(2, 3, device="npu").fill_(7).cpu().eq(7).all()
