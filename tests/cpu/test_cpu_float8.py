"""The FP8 cast, checked against an oracle that knows only the formats' bit fields (OCP 8-bit floating point, 2023)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.cpu import float8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MANTISSA_BITS_AND_BIAS = {E4M3: (3, 7), E5M2: (2, 15)}
NAN_CODES = {E4M3: {0x7F, 0xFF}, E5M2: {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}}
INFINITY_CODES: dict[torch.dtype, set[int]] = {E4M3: set(), E5M2: {0x7C, 0xFC}}
ONE = torch.ones(1)


def value_of(code: int, dtype: torch.dtype) -> float:
    mantissa_bits, bias = MANTISSA_BITS_AND_BIAS[dtype]
    if code in NAN_CODES[dtype]:
        return float("nan")
    sign = -1.0 if code & 0x80 else 1.0
    if code in INFINITY_CODES[dtype]:
        return sign * float("inf")
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def finite_codes(dtype: torch.dtype) -> list[int]:
    return [code for code in range(256) if np.isfinite(value_of(code, dtype))]


def nearest_code(value: float, dtype: torch.dtype) -> int:
    """The code nearest to ``value``, the one with an even code in a tie, the largest one beyond the range."""
    sign = 0x80 if np.signbit(value) else 0
    magnitudes = [code for code in finite_codes(dtype) if code < 0x80]
    size = min(abs(value), value_of(magnitudes[-1], dtype))
    return sign | min(magnitudes, key=lambda code: (abs(size - value_of(code, dtype)), code % 2))


def encode(values: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor = ONE) -> list[int]:
    return float8.encode(values, scale, dtype).data.tolist()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16])
def test_every_code_decodes_to_the_value_of_its_bit_fields(dtype: torch.dtype, to: torch.dtype) -> None:
    decoded = float8.decode(torch.arange(256, dtype=torch.uint8), dtype, to).double().numpy()
    expected = np.array([value_of(code, dtype) for code in range(256)])
    np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_finite_code_survives_decoding_and_encoding(dtype: torch.dtype) -> None:
    codes = torch.tensor(finite_codes(dtype), dtype=torch.uint8)
    assert encode(float8.decode(codes, dtype), dtype) == codes.tolist()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_values_between_two_codes_go_to_the_nearest_and_ties_to_the_even_one(dtype: torch.dtype) -> None:
    magnitudes = sorted(value_of(code, dtype) for code in finite_codes(dtype) if code < 0x80)
    middles = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(magnitudes)])
    around = torch.cat([middles, middles.nextafter(torch.zeros(())), middles.nextafter(torch.tensor(1e9))])
    values = torch.cat([around, -around])
    assert encode(values, dtype) == [nearest_code(value, dtype) for value in values.tolist()]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_any_finite_number_goes_to_its_nearest_code(dtype: torch.dtype, value: float) -> None:
    assert encode(torch.tensor([value]), dtype) == [nearest_code(value, dtype)]


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 0x7E), (E5M2, 0x7B)])
def test_what_exceeds_the_range_saturates_infinities_too(dtype: torch.dtype, largest: int) -> None:
    values = torch.tensor([1e6, float("inf"), -1e6, -float("inf")])
    assert encode(values, dtype) == [largest, largest, largest | 0x80, largest | 0x80]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_nan_becomes_the_canonical_nan(dtype: torch.dtype) -> None:
    nan = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert encode(nan, dtype)[:3] == [0x7F, 0x7F, 0x7F]
    assert encode(nan, dtype)[3] == nearest_code(1.0, dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_gives_what_the_codes_of_a_cast_stand_for(dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(0))
    magnitudes = torch.tensor(sorted(value_of(code, dtype) for code in finite_codes(dtype)))
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    values = torch.cat([bits.int().view(torch.float32), torch.randn(1 << 16), magnitudes, ties, torch.tensor([1e9])])
    expected = float8.decode(float8.cast(values.clone(), dtype), dtype)
    is_number = ~values.isnan()
    actual = float8.rounded(values.clone(), dtype)
    assert torch.equal(actual[is_number], expected[is_number])
    assert actual[~is_number].isnan().all()


def test_zeros_keep_their_sign() -> None:
    assert encode(torch.tensor([0.0, -0.0]), E4M3) == [0x00, 0x80]


def test_bf16_values_are_scaled_in_fp32() -> None:
    value, scale = torch.tensor([1.0078125], dtype=torch.bfloat16), torch.tensor([1.055])
    product = value.float() * scale
    assert encode(value, E4M3, scale) == [nearest_code(product.item(), E4M3)] == [0x39]
    assert encode(product.bfloat16(), E4M3) == [0x38], "the example is one where rounding to BF16 first would differ"


def test_scale_inv_is_the_fp32_reciprocal_of_the_scale() -> None:
    scale = torch.tensor([1.055])
    assert torch.equal(float8.encode(torch.ones(2, 2), scale, E4M3).scale_inv, 1 / scale)


@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20),
    nans=st.integers(0, 3),
)
def test_amax_is_the_largest_magnitude_and_passes_over_nans(values: list[float], nans: int) -> None:
    tensor = torch.tensor([float("nan")] * nans + values)
    assert float8.amax_of(tensor).item() == max(abs(value) for value in values)


def test_amax_of_nothing_is_zero() -> None:
    assert float8.amax_of(torch.empty(0, 16)).item() == 0.0


def test_a_transpose_puts_the_last_dimension_first() -> None:
    codes = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    result = float8.transpose(codes)
    assert result.is_contiguous()
    assert torch.equal(result, codes.permute(2, 0, 1))
