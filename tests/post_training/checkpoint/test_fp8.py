"""Dequantisation equals its defining formula bit for bit, for every code, block position and slice."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from post_training.checkpoint.fp8 import BLOCK, dequantise, scale_shape, scale_slice

FINITE_CODES = [code for code in range(256) if code & 0x7F != 0x7F]


def by_the_formula(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return bf16(float32(w) * s), each element with its block's scale, by torch's own float8 conversion."""
    rows = torch.arange(values.shape[0]) // BLOCK
    columns = torch.arange(values.shape[1]) // BLOCK
    return (values.to(torch.float32) * scales[rows[:, None], columns[None, :]]).to(torch.bfloat16)


def random_weight(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.tensor(FINITE_CODES, dtype=torch.uint8)
    picked = codes[torch.randint(len(codes), (rows, columns), generator=generator)]
    exponents = torch.randint(-30, 6, scale_shape((rows, columns)), generator=generator)
    scales = torch.rand(exponents.shape, generator=generator).add(0.5) * 2.0**exponents
    return picked.view(torch.float8_e4m3fn), scales


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


@pytest.mark.parametrize("scale", [1.0, 3.7e-4, 2.0**-140, 2.0**100, 3e38, 0.0, -1.5])
def test_every_code_equals_the_formula(scale):
    values = torch.tensor(FINITE_CODES, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(2, 127)
    scales = torch.full((1, 1), scale)
    assert same_bits(dequantise(values, scales, ((0, 2), (0, 127))), by_the_formula(values, scales))


@given(data=st.data())
@settings(max_examples=60)
def test_every_slice_equals_the_same_part_of_the_formula(data):
    rows, columns = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 400))
    values, scales = random_weight(rows, columns, data.draw(st.integers(0, 1000)))
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    bottom, right = data.draw(st.integers(top + 1, rows)), data.draw(st.integers(left + 1, columns))
    bounds = ((top, bottom), (left, right))
    (scale_top, scale_bottom), (scale_left, scale_right) = scale_slice(bounds)
    part = scales[scale_top:scale_bottom, scale_left:scale_right]
    expected = by_the_formula(values, scales)[top:bottom, left:right]
    assert same_bits(dequantise(values[top:bottom, left:right], part, bounds), expected)


def test_a_wide_weight_is_converted_in_slabs():
    values, scales = random_weight(300, 5000, seed=3)
    out = torch.empty(300, 10000, dtype=torch.bfloat16)[:, ::2]
    assert dequantise(values, scales, ((0, 300), (0, 5000)), out) is out
    assert same_bits(out, by_the_formula(values, scales))


def test_neighbouring_scale_detected():
    values, scales = random_weight(256, 256, seed=4)
    assert not same_bits(dequantise(values, scales.flip(0), ((0, 256), (0, 256))), by_the_formula(values, scales))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(130, 4, dtype=torch.uint8).fill_(0x7F).view(torch.float8_e4m3fn)}, "NaN"),
        ({"values": torch.zeros(130, 4, dtype=torch.uint8).fill_(0xFF).view(torch.float8_e4m3fn)}, "NaN"),
        ({"scales": torch.tensor([[1.0], [float("inf")]])}, "not finite"),
        ({"scales": torch.ones(1, 1)}, "scales"),
        ({"scales": torch.ones(2, 1, dtype=torch.bfloat16)}, "float32"),
        ({"values": torch.zeros(130, 4)}, "float8"),
    ],
)
def test_unquantised_weight_rejected(change, message):
    values = torch.zeros(130, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=message):
        dequantise(**{"values": values, "scales": torch.ones(2, 1), "bounds": ((0, 130), (0, 4))} | change)
