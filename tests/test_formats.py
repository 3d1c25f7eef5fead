"""Number formats of GEMM operands."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.numerics.formats import (
    e4m3,
    e4m3_blocks,
    e4m3_squares,
    e5m2,
    hadamard,
    is_alike_both_ways,
    nearest_fp8,
    nvfp4_blocks,
    nvfp4_squares,
    nvfp4_stochastic,
    tf32,
)


def tf32_by_integers(x):
    """Round the FP32 pattern to 10 mantissa bits, ties to even."""
    bits = x.view(torch.int32).long()
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return bits.to(torch.int32).view(torch.float32)


@given(st.lists(st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100), min_size=1, max_size=50))
def test_tf32_keeps_ten_mantissa_bits(values):
    x = torch.tensor(values, dtype=torch.float32)
    x = x[(x == 0) | (x.abs() > 1e-30)]
    assert (tf32(x) - x).abs().le(x.abs() * 2.0**-11).all()
    ties = x.view(torch.int32) & 0x1FFF == 0x1000
    assert torch.equal(tf32(x)[~ties], tf32_by_integers(x)[~ties])


@pytest.mark.parametrize(("fp8", "dtype"), [(e4m3, torch.float8_e4m3fn), (e5m2, torch.float8_e5m2)])
def test_an_fp8_format_maps_the_largest_magnitude_to_the_largest_code(fp8, dtype):
    x = torch.tensor([0.3, -1.7, 0.0])
    assert fp8(x)[1].item() == pytest.approx(-1.7, rel=1e-6)
    codes = fp8(x) * torch.finfo(dtype).max / 1.7
    assert torch.allclose(codes.to(dtype).float(), codes)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_values_are_those_of_a_cast_there_and_back(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].unique()
    ties = (codes[1:] + codes[:-1]) / 2
    near = torch.cat((ties, codes))
    largest = torch.finfo(dtype).max
    spread = torch.randn(10_000) * torch.logspace(-10, 0, 10_000) * largest
    x = torch.cat((near, near * (1 + 2.0**-20), near * (1 - 2.0**-20), spread)).clamp(-largest, largest)
    assert torch.equal(nearest_fp8(x, dtype), x.to(dtype).float())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_in_fp8(value):
    assert nearest_fp8(torch.tensor([value]), torch.float8_e4m3fn).isnan().all()


def test_an_fp8_format_takes_zeros_and_empty_tensors():
    assert torch.equal(e4m3(torch.zeros(3)), torch.zeros(3))
    assert e4m3(torch.zeros(0)).shape == (0,)


def relative(x, golden):
    return ((x - golden).norm() / golden.norm()).item()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("length", [32, 128])
def test_a_block_does_not_see_another_blocks_outlier(dim, length):
    x = torch.randn(256, 256)
    spoiled = x.clone()
    spoiled[0, 0] = 1e6
    changed = e4m3_blocks(length)(spoiled, dim) != e4m3_blocks(length)(x, dim)
    along = changed.movedim(dim, -1)
    assert along[0, :length].any()
    assert not along[0, length:].any()
    assert not along[1:].any()


def test_a_square_shares_its_scale_in_both_dimensions():
    x = torch.randn(256, 256)
    spoiled = x.clone()
    spoiled[0, 0] = 1e6
    changed = e4m3_squares(spoiled, 1) != e4m3_squares(x, 1)
    assert changed[:128, :128].any()
    assert not changed[128:].any()
    assert not changed[:, 128:].any()


@given(st.floats(2.0**-60, 2.0**60))
def test_a_power_of_two_scale_overflows_nothing_and_wastes_less_than_a_bit(largest):
    block = torch.tensor([[largest, *([0.0] * 31)]])
    rounded = e4m3_blocks(32)(block, 1)
    assert abs(rounded[0, 0].item() / largest - 1) <= 2.0**-4


@pytest.mark.parametrize("fmt", [e4m3, e5m2, e4m3_blocks(128), e4m3_squares, nvfp4_blocks, nvfp4_squares])
def test_what_a_format_holds_it_holds(fmt):
    x = torch.randn(64, 160)
    once = fmt(x, 1)
    assert relative(fmt(once, 1), once) < 1e-2


@pytest.mark.parametrize(
    ("fmt", "low", "high"),
    [
        (e4m3_blocks(32), 0.02, 0.03),
        (e4m3_blocks(128), 0.02, 0.03),
        (e4m3_squares, 0.02, 0.03),
        (nvfp4_blocks, 0.08, 0.11),
        (nvfp4_squares, 0.08, 0.13),
        (nvfp4_stochastic, 0.11, 0.16),
    ],
)
def test_gaussian_values_lose_what_the_mantissa_says(fmt, low, high):
    x = torch.randn(512, 512)
    assert low < relative(fmt(x, 1), x) < high


def test_stochastic_rounding_is_right_on_average():
    x = torch.full((1, 16), 0.8)
    x[0, 0] = 6.0
    many = nvfp4_stochastic(x.repeat(20000, 1), 1)[:, 1:]
    assert set(many.unique().tolist()) <= {0.5, 1.0}
    assert many.mean().item() == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("dim", [0, 1])
def test_rotated_operands_have_the_same_product(dim):
    a, b = torch.randn(8, 64, dtype=torch.float64), torch.randn(64, 4, dtype=torch.float64)
    assert torch.allclose(hadamard(a, 1) @ hadamard(b, 0), a @ b)
    assert torch.allclose(hadamard(hadamard(a, 1), 1), a)


@pytest.mark.parametrize("fmt", [e4m3_blocks(32), e4m3_squares, nvfp4_blocks, nvfp4_squares, nvfp4_stochastic])
def test_zeros_and_odd_shapes_are_taken(fmt):
    assert torch.equal(fmt(torch.zeros(3, 5), 1), torch.zeros(3, 5))
    assert fmt(torch.randn(17, 33), 0).shape == (17, 33)


@pytest.mark.parametrize(
    "fmt", [tf32, e4m3, e5m2, e4m3_blocks(128), e4m3_squares, nvfp4_blocks, nvfp4_squares, nvfp4_stochastic]
)
def test_a_format_is_alike_both_ways_if_it_does_not_matter_which_dimension_a_gemm_sums_over(fmt):
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 256)
    assert is_alike_both_ways(fmt) is torch.equal(fmt(x, 0), fmt(x, 1))
