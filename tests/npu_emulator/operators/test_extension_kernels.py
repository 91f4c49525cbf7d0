"""Kernels behind extensions of training code against loops, torch's own optimizer and whole attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from npu_emulator import strict
from npu_emulator.operators import exposed
from tests.npu_emulator.operators.compare import assert_like_reference

kernels = exposed("npu_extension")
some_sizes = some.lists(some.integers(0, 5), min_size=1, max_size=4).filter(any)


def grouped(sizes, k=3, n=4, seed=0):
    """Rows, one weight per group, the gradient of their products, and the running totals."""
    torch.manual_seed(seed)
    rows = sum(sizes)
    totals = torch.tensor(sizes).cumsum(0)
    return torch.randn(rows, k), torch.randn(len(sizes), k, n), torch.randn(rows, n), totals


def by_loop(x, weight, gradient, sizes):
    """Products, gradients of x and gradients of the weight, group by group in float64."""
    results = [], [], []
    for row, one, of_product in zip(
        x.double().split(sizes), weight.double(), gradient.double().split(sizes), strict=True
    ):
        for collected, value in zip(results, (row @ one, of_product @ one.t(), row.t() @ of_product), strict=True):
            collected.append(value)
    return torch.cat(results[0]), torch.cat(results[1]), torch.stack(results[2])


def assert_near(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance)


@settings(max_examples=20)
@given(some_sizes, some.sampled_from(["totals", "numbers", "list"]))
def test_grouped_products_and_their_gradients(sizes, form):
    x, weight, gradient, totals = grouped(sizes)
    product, of_x, of_weight = by_loop(x, weight, gradient, sizes)
    x, weight, gradient = (tensor.to("npu") for tensor in (x, weight, gradient))
    groups = {"totals": totals.to("npu"), "numbers": torch.tensor(sizes).to("npu"), "list": totals.tolist()}[form]
    kind = int(form == "numbers")
    assert_near(kernels["npu_gmm"]([x], [weight], [], groups, 0, kind)[0], product)
    assert_near(kernels["npu_gmm"]([x.t()], [gradient], [], groups, 2, kind)[0], of_weight)
    (got_of_x,), (got_of_weight,), none = kernels["npu_gmm_backward"]([gradient], [x], [weight], groups, kind)
    assert_near(got_of_x, of_x)
    assert_near(got_of_weight, of_weight)
    (again,), nothing, none_again = kernels["npu_gmm_backward_fusion"]([gradient], [weight], groups, kind)
    assert torch.equal(again, got_of_x) and none == nothing == none_again == []


@settings(max_examples=10)
@given(some_sizes)
def test_gradients_are_added_to_a_total_in_float32(sizes):
    x, weight, gradient, totals = grouped(sizes)
    x, gradient = x.bfloat16(), gradient.bfloat16()
    _, _, of_weight = by_loop(x, weight, gradient, sizes)
    before = torch.randn(len(sizes) * 3, 4)
    total = before.to("npu")
    kernels["npu_groupmatmul_add_fp32"](x.to("npu"), gradient.to("npu"), totals.to("npu"), total)
    assert_near(total, before + of_weight.flatten(0, 1))
    one = torch.ones(3, 4, device="npu")
    kernels["npu_matmul_add_fp32"](x.to("npu"), gradient.to("npu"), one)
    assert_near(one, 1 + x.double().t() @ gradient.double())


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_three_steps_of_the_fused_optimizer_are_those_of_torch(maximize, amsgrad):
    torch.manual_seed(0)
    expected = torch.nn.Parameter(torch.randn(7, dtype=torch.float64))
    options = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    optimizer = torch.optim.AdamW([expected], amsgrad=amsgrad, maximize=maximize, **options)
    parameter = expected.detach().float().to("npu")
    first, second, largest = (torch.zeros(7, device="npu") for _ in range(3))
    for step in range(1, 4):
        # Smaller each time, so that the largest second moment is not the last one.
        expected.grad = torch.randn(7, dtype=torch.float64) / step**2
        optimizer.step()
        kernels["npu_apply_fused_adamw_v2"](
            parameter, expected.grad.float().to("npu"), first, second, largest if amsgrad else None,
            torch.tensor([step]).to("npu"), 0.1, 0.8, 0.9, 0.3, 1e-6, amsgrad, maximize,
        )  # fmt: skip
        assert_near(parameter, expected.detach())


@pytest.mark.parametrize("mode", [0, 1])
def test_the_averaging_optimizer_is_that_of_torch_and_a_moving_average(mode):
    torch.manual_seed(0)
    expected = torch.nn.Parameter(torch.randn(7, dtype=torch.float64))
    kind = torch.optim.AdamW if mode else torch.optim.Adam
    optimizer = kind([expected], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    average = torch.randn(7, dtype=torch.float64)
    held = [expected.detach().float().to("npu"), *(torch.zeros(7, device="npu") for _ in range(2))]
    held.append(average.float().to("npu"))
    for step in range(1, 4):
        expected.grad = torch.randn(7, dtype=torch.float64)
        optimizer.step()
        average = 0.7 * average + 0.3 * expected.detach()
        results = kernels["npu_apply_fused_ema_adamw"](
            expected.grad.float().to("npu"), *held, torch.tensor([step]).to("npu"), 0.1, 0.7, 0.8, 0.9, 1e-6, mode,
            True, 0.3,
        )  # fmt: skip
        assert all(torch.equal(result, own) for result, own in zip(results, held, strict=True))
        assert_near(held[0], expected.detach())
        assert_near(held[3], average)
    with pytest.raises(AssertionError):
        assert_near(held[3], expected.detach())


def test_the_averaging_optimizer_without_correction_takes_moments_as_they_are():
    gradient, parameter = torch.tensor([2.0]).to("npu"), torch.tensor([1.0]).to("npu")
    rest = [torch.zeros(1, device="npu") for _ in range(3)]
    kernels["npu_apply_fused_ema_adamw"](
        gradient, parameter, *rest, torch.tensor([1]).to("npu"), 0.5, 0.9, 0.75, 0.75, 0.0, 1, False, 0.0
    )
    assert_near(parameter, torch.tensor([1 - 0.5 * (0.25 * 2) / (0.25 * 4) ** 0.5]))
    with (
        strict.enabled(),
        pytest.raises(strict.ForbiddenInput, match="fused_ema_adamw: grad must be float32"),
    ):
        kernels["npu_apply_fused_ema_adamw"](
            gradient.half(), parameter, *rest, torch.tensor([1]).to("npu"), 0.5, 0.9, 0.75, 0.75, 0.0, 1, False, 0.0
        )


@pytest.mark.parametrize("with_probabilities", [False, True])
def test_tokens_go_to_their_experts_and_come_back(with_probabilities):
    torch.manual_seed(0)
    tokens, experts = torch.randn(6, 5), torch.randint(0, 4, (6, 2) if with_probabilities else (6,))
    probabilities = torch.rand(6, 2)

    def there(x):
        return kernels["npu_moe_token_permute"](x, experts.to("npu"))[0]

    def there_by_sorting(x):
        order = sorted(range(experts.numel()), key=lambda place: experts.flatten()[place])
        return torch.stack([x[place // (2 if with_probabilities else 1)] for place in order])

    def round_trip(x, weights):
        rows, places = kernels["npu_moe_token_permute"](x, experts.to("npu"))
        return (
            kernels["npu_moe_token_unpermute"](rows, places, weights if with_probabilities else None)
            + 0 * weights.sum()
        )

    assert_like_reference(there, there_by_sorting, [tokens])
    weight = (lambda weights: weights.sum(1, keepdim=True)) if with_probabilities else (lambda weights: 1)
    assert_like_reference(
        round_trip, lambda x, weights: x * weight(weights) + 0 * weights.sum(), [tokens, probabilities]
    )


def test_weighted_sums_are_float32_when_the_weights_are():
    rows = torch.ones(2, 1, dtype=torch.bfloat16, device="npu")
    places = torch.tensor([0, 1], dtype=torch.int32, device="npu")
    # 1 + 1/256 lies half way between two numbers of bfloat16 and becomes 1; 1 + 2/256 is one of them.
    weights = torch.tensor([[1 + 1 / 256, 1 / 256]], device="npu")
    wide = kernels["npu_moe_token_unpermute"](rows, places, weights)
    narrow = kernels["npu_moe_token_unpermute"](rows, places, weights.bfloat16())
    assert wide.dtype == narrow.dtype == torch.bfloat16
    assert (wide.item(), narrow.item()) == (1 + 2 / 256, 1.0)


@pytest.mark.parametrize("mode", [0, 1])
def test_rotation_by_complex_numbers(mode):
    torch.manual_seed(0)
    x, angles = torch.randn(3, 2, 2, 8), torch.randn(3, 1, 1, 4)
    spread = (
        (lambda value: torch.cat((value, value), -1)) if mode == 0 else (lambda value: value.repeat_interleave(2, -1))
    )
    cos, sin = spread(angles.cos()).to("npu"), spread(angles.sin()).to("npu")

    def by_complex_numbers(states):
        pairs = states.unflatten(-1, (2, 4)).transpose(-1, -2) if mode == 0 else states.unflatten(-1, (4, 2))
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
        turned = torch.view_as_real(turned)
        return (turned.transpose(-1, -2) if mode == 0 else turned).flatten(-2)

    assert_like_reference(
        lambda states: kernels["npu_rotary_position_embedding"](states, cos, sin, mode), by_complex_numbers, [x]
    )
    with pytest.raises(RuntimeError, match="mode must be 0 or 1, not 2"):
        kernels["npu_rotary_position_embedding"](x.to("npu"), cos, sin, 2)


def attention_part(query, key, value):
    """Output [heads, q, d] with the largest scores and the sums of exponentials [heads, q]."""
    scores = query @ key.transpose(-1, -2)
    largest = scores.amax(-1)
    weights = (scores - largest.unsqueeze(-1)).exp()
    return weights @ value / weights.sum(-1, keepdim=True), largest, weights.sum(-1)


@pytest.mark.parametrize("layout", ["SBH", "TND"])
def test_two_parts_of_the_keys_make_the_whole(layout):
    torch.manual_seed(0)
    batch, heads, size = 2, 3, 4
    query, key, value = (torch.randn(batch * heads, 5, size, dtype=torch.float64) for _ in range(3))
    parts = [attention_part(query, key[:, picked], value[:, picked]) for picked in (slice(2), slice(2, 5))]
    whole = attention_part(query, key, value)

    def shaped(output, *statistics):
        output = output.unflatten(0, (batch, heads))
        statistics = [item.unflatten(0, (batch, heads)).unsqueeze(-1).expand(-1, -1, -1, 8) for item in statistics]
        if layout == "SBH":
            return [output.permute(2, 0, 1, 3).flatten(2), *statistics]
        return [item.transpose(1, 2).flatten(0, 1) for item in (output, *statistics)]

    given = [item.float().contiguous().to("npu") for part in parts for item in shaped(*part)]
    found = kernels["npu_ring_attention_update"](*given, None, layout)
    for got, expected in zip(found, shaped(*whole), strict=True):
        assert_near(got, expected)


def test_what_is_not_emulated_is_said():
    x = torch.ones(2, 2, device="npu")
    with pytest.raises(NotImplementedError, match="only one x and one weight"):
        kernels["npu_gmm"]([x, x], [x, x], [], None, -1, 0)
    with pytest.raises(NotImplementedError, match="group_type -1 is not emulated"):
        kernels["npu_gmm"]([x], [x.unsqueeze(0)], [], [2], -1, 0)
