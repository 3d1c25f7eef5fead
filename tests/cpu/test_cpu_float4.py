"""E2M1: codes, roundings and packing, over all codes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parity.cpu import float4

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = torch.tensor(MAGNITUDES + [-magnitude for magnitude in MAGNITUDES])


def test_all_codes_decode_to_their_values_and_back() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(float4.decode(float4.pack(codes)), VALUES)
    assert torch.equal(float4.encode(VALUES), codes)


def test_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(MAGNITUDES)])
    assert float4.encode(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert float4.encode(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]


@pytest.mark.parametrize("encode", [float4.encode, float4.encode_stochastically])
@pytest.mark.parametrize(("value", "code"), [(6.5, 7), (-1e30, 15), (math.inf, 7), (-math.inf, 15), (math.nan, 7)])
def test_values_beyond_6_saturate_and_nan_is_6(encode: Callable[[Tensor], Tensor], value: float, code: int) -> None:
    assert encode(torch.tensor([value])).item() == code


def test_a_nan_has_no_sign() -> None:
    assert float4.encode(torch.tensor([-math.nan]).copysign(torch.tensor(-1.0))).item() == 7


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=64))
def test_encode_rounds_as_ml_dtypes_does(numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    expected = values.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    codes = float4.encode(values)
    assert np.array_equal(VALUES[codes.int()].numpy(), expected)
    assert torch.equal(codes >= 8, values.signbit())


@pytest.mark.parametrize("low_bits", [0x0000, 0x0001, 0x8000, 0xFFFF])
def test_encode_rounds_as_ml_dtypes_does_whatever_the_upper_bits(low_bits: int) -> None:
    values = ((torch.arange(1 << 16, dtype=torch.int32) << 16) | low_bits).view(torch.float32)
    values = values[~values.isnan()]
    expected = values.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(float4.encode(values).numpy(), expected)


@pytest.mark.parametrize("boundary", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_neighbours_of_a_tie_go_to_its_two_sides(boundary: float) -> None:
    tie = torch.tensor(boundary)
    around = torch.stack([torch.nextafter(tie, torch.tensor(0.0)), torch.nextafter(tie, torch.tensor(9.0))])
    below, above = float4.encode(around).tolist()
    assert above == below + 1


def test_the_first_of_a_pair_lies_in_the_low_bits() -> None:
    codes = torch.tensor([[1, 15, 8, 2]], dtype=torch.uint8)
    packed = float4.pack(codes)
    assert packed.tolist() == [[0xF1, 0x28]]
    assert torch.equal(float4.unpack(packed), codes)


def test_transpose_is_that_of_the_codes() -> None:
    codes = torch.randint(16, (6, 8), dtype=torch.uint8)
    assert torch.equal(float4.unpack(float4.transpose(float4.pack(codes))), codes.t())


@pytest.mark.parametrize("value", [0.1, -0.3, 0.5, 1.2, -1.75, 2.9, -3.0, 5.9])
def test_stochastic_rounding_has_the_value_as_its_mean(value: float) -> None:
    torch.manual_seed(0)
    draws = 20000
    decoded = VALUES[float4.encode_stochastically(torch.full((draws,), value)).int()]
    assert len(set(decoded.tolist())) <= 2
    # Six standard deviations of the mean of a variable that is at most 2 wide.
    assert abs(decoded.mean().item() - value) < 6 * 1.0 / math.sqrt(draws)


def test_stochastic_rounding_is_linear_between_any_two_neighbours() -> None:
    torch.manual_seed(0)
    draws, fractions = 4000, torch.arange(1, 16) / 16
    for code, (low, high) in enumerate(itertools.pairwise(MAGNITUDES)):
        values = (low + fractions * (high - low)).repeat(draws, 1)
        codes = float4.encode_stochastically(values)
        assert set(codes.unique().tolist()) == {code, code + 1}
        # Six standard deviations of the mean of a variable that is 0 or 1.
        assert ((codes == code + 1).float().mean(0) - fractions).abs().max() < 6 * 0.5 / math.sqrt(draws)


def test_stochastic_rounding_is_seeded_by_pytorch() -> None:
    values = torch.linspace(-6, 6, 1000)
    torch.manual_seed(1)
    first = float4.encode_stochastically(values)
    second = float4.encode_stochastically(values)
    torch.manual_seed(1)
    assert torch.equal(float4.encode_stochastically(values), first)
    assert not torch.equal(first, second)


def test_stochastic_rounding_leaves_representable_values() -> None:
    assert torch.equal(float4.encode_stochastically(VALUES), torch.arange(16, dtype=torch.uint8))
