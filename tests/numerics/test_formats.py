"""Number formats and error measures, and when errors are computed in FP64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.numerics import errors
from parity.numerics.errors import GoldenTensor, difference, in_fp32
from parity.numerics.formats import (
    Quantized,
    Recast,
    Requantized,
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

# Number formats of GEMM operands.


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


def test_a_tensors_scale_may_be_a_power_of_two():
    x = torch.randn(64, 64)
    scaled = Quantized("E4M3", power_of_two=True)(x)
    assert torch.equal(scaled, Quantized("E4M3", power_of_two=True)(2 * x) / 2)
    scale = 2.0 ** math.floor(math.log2(448 / x.abs().max().item()))
    assert torch.equal(scaled, (x * scale).to(torch.float8_e4m3fn).float() / scale)


def test_a_smaller_amax_counts_as_the_least_one():
    x = torch.full((1, 4), 1e-3)
    assert torch.equal(Quantized("E4M3", least_amax=1.0)(x), (x * 448).to(torch.float8_e4m3fn).float() / 448)
    assert torch.equal(Quantized("E4M3", least_amax=1e-4)(x), e4m3(x))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_row_with_a_scale_of_its_own_does_not_see_the_others(dim):
    by_row, x = Quantized("E2M1", 16, row_scaled=True), torch.randn(64, 48)
    spoiled = x.clone()
    spoiled.select(1 - dim, 0).mul_(1e6)
    before, after = (by_row(one, dim).narrow(1 - dim, 1, 47) for one in (x, spoiled))
    assert torch.equal(before, after)
    assert not torch.equal(*(nvfp4_blocks(one, dim).narrow(1 - dim, 1, 47) for one in (x, spoiled)))


@pytest.mark.parametrize(("measure", "power"), [("MAE", 1), ("MSE", 2)])
def test_four_over_six_is_never_worse_than_six_in_a_block(measure, power):
    x = torch.randn(128, 16)
    six, chosen = (
        (Quantized("E2M1", 16, largest_scale=256.0, four_over_six=how)(x, 1) - x).abs().pow(power).sum(1)
        for how in ("", measure)
    )
    assert (chosen <= six * (1 + 1e-6)).all()
    assert (chosen < 0.99 * six).any()


def test_what_is_read_again_was_rounded_along_the_other_dimension_first():
    x = torch.randn(64, 64)
    again = Requantized(e4m3_blocks(32), nvfp4_blocks, torch.bfloat16)
    assert torch.equal(again(x, 0), nvfp4_blocks(e4m3_blocks(32)(x, 1).bfloat16().float(), 0))
    assert torch.equal(
        Requantized(e4m3_blocks(32), None, torch.bfloat16)(x, 0), e4m3_blocks(32)(x, 1).bfloat16().float()
    )


def test_a_result_that_is_cast_twice_has_the_errors_of_both():
    x = torch.randn(512, 512)
    once, twice = relative(e5m2(x), x), relative(Recast(e5m2)(x), x)
    assert 1.1 * once < twice < 1.5 * once
    leaning = Recast(e5m2, gain=1 + 1 / 16)(x)
    assert torch.allclose(leaning, Recast(e5m2)(x) * (1 + 1 / 16))


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


# Measures of errors.


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
finite = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30)


def measure(x, golden):
    return errors.measure(x, golden, torch.float32)


def fp64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_relative_l2_is_the_norm_of_the_error_over_the_norm_of_golden():
    assert measure(fp64(3.0, 4.5), fp64(3.0, 4.0)).relative_l2 == pytest.approx(0.5 / 5.0)


def test_relative_l2_of_two_zeros_is_zero_and_of_golden_zero_alone_infinite():
    assert measure(fp64(0.0), fp64(0.0)).relative_l2 == 0.0
    assert measure(fp64(1.0), fp64(0.0)).relative_l2 == math.inf


def test_sqnr_counts_20_db_for_each_factor_of_10():
    assert measure(fp64(1.01), fp64(1.0)).sqnr_db == pytest.approx(40.0)


@given(finite)
def test_an_fp32_ulp_is_numpys_spacing(value):
    value, spacing = float(np.float32(value)), float(np.spacing(np.float32(value)))
    assert errors.measure(fp64(value + spacing), fp64(value), torch.float32).max_ulps == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_next_number_up_is_one_ulp_away(dtype):
    x = torch.tensor([1.0, 1.5, 3.0, 100.0, 1e-3], dtype=dtype)
    up = torch.nextafter(x.float(), torch.full_like(x, math.inf).float()) if dtype == torch.float32 else None
    bits = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}[dtype]
    next_up = (x.view(bits) + 1).view(dtype)
    if up is not None:
        assert torch.equal(next_up, up)
    assert errors.measure(next_up, x.double(), dtype).max_ulps == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_near_zero_an_ulp_is_the_smallest_subnormal(dtype):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert errors.measure(fp64(smallest), fp64(0.0), dtype).max_ulps == 1.0


def test_cosine_does_not_see_scale_but_sees_direction():
    assert measure(fp64(2.0, 0.0), fp64(1.0, 0.0)).cosine == 1.0
    assert measure(fp64(0.0, 1.0), fp64(1.0, 0.0)).cosine == 0.0
    assert measure(fp64(-1.0, 0.0), fp64(1.0, 0.0)).cosine == -1.0
    assert measure(fp64(0.0, 0.0), fp64(0.0, 0.0)).cosine == 1.0
    assert measure(fp64(1.0, 0.0), fp64(0.0, 0.0)).cosine == 0.0


def test_a_nan_is_counted_and_located_and_the_rest_is_measured():
    golden = torch.ones(2, 3, dtype=torch.float64)
    x = golden.clone()
    x[1, 2] = math.nan
    x[0, 1] = 2.0
    measured = errors.measure(x, golden, torch.float32)
    assert (measured.nans, measured.infs, measured.first_non_finite) == (1, 0, (1, 2))
    assert measured.max_abs == 1.0
    assert not measured.finite


def test_an_infinity_of_the_golden_value_is_not_blamed_on_the_candidate():
    measured = errors.measure(fp64(math.inf, 1.0), fp64(math.inf, 1.0), torch.float32)
    assert (measured.nans, measured.infs, measured.golden_non_finite) == (0, 0, 1)
    assert not measured.finite


def test_an_empty_tensor_has_no_error():
    measured = errors.measure(torch.zeros(0), torch.zeros(0, dtype=torch.float64), torch.float32)
    assert (measured.relative_l2, measured.max_abs, measured.finite) == (0.0, 0.0, True)


def test_different_shapes_are_an_error_that_names_both():
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        errors.measure(torch.zeros(2), torch.zeros(3), torch.float32)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.floats(1e-6, 1e6))
def test_relative_measures_do_not_depend_on_units(values, unit):
    golden = fp64(*values)
    x = golden * 1.001
    assert measure(x * unit, golden * unit).relative_l2 == pytest.approx(measure(x, golden).relative_l2, rel=1e-6)
    assert measure(x * unit, golden * unit).cosine == pytest.approx(1.0)


# Errors are computed in FP32 if it is precise enough for them, and in FP64 otherwise.


def golden(scale=1.0, shape=(8, 64)):
    return scale * torch.randn(shape, dtype=torch.float64)


@given(st.floats(-8, 8), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.floats(-7, 0))
def test_errors_agree_with_fp64s(exponent, dtype, relative):
    truth = golden(10.0**exponent)
    computed = (truth * (1.0 + 10.0**relative * golden())).to(dtype)
    exact = difference(computed, truth)
    found = GoldenTensor(truth).deviations([computed])
    assert found.golden.values.dtype == found.errors[0].values.dtype == torch.float32
    assert torch.allclose(found.errors[0].values.double(), exact, rtol=1e-6, atol=1e-7 * exact.abs().max().item())
    assert found.errors[0].norm == pytest.approx(exact.norm().item(), rel=1e-6)


def test_what_golden_has_beyond_fp32_is_part_of_the_error():
    truth = torch.full((4, 8), 1.0 + 2.0**-30, dtype=torch.float64)
    (error,) = GoldenTensor(truth).deviations([torch.ones(4, 8)]).errors
    assert torch.equal(error.values.double(), torch.full_like(truth, -(2.0**-30)))


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_values_near_the_ends_of_fp32s_range_are_judged_in_fp64(scale):
    truth = golden(scale)
    found = GoldenTensor(truth).deviations([truth.float()])
    assert torch.equal(found.golden.values, truth)
    assert torch.equal(found.errors[0].values, difference(truth.float(), truth))


def test_one_error_out_of_range_puts_all_in_fp64():
    truth = golden()
    found = GoldenTensor(truth).deviations([truth.float(), 1e18 * truth.float()])
    assert {summed.values.dtype for summed in (found.golden, *found.errors)} == {torch.float64}
    assert found.errors[1].norm == pytest.approx(1e18 * truth.norm().item())


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_error_that_is_not_finite_is_told(wrong):
    computed = golden().float()
    computed[3, 5] = wrong
    found = GoldenTensor(golden()).deviations([golden().float(), computed])
    assert [error.is_finite for error in found.errors] == [True, False]


def test_zeros_have_no_error():
    (error,) = GoldenTensor(torch.zeros(4, 8, dtype=torch.float64)).deviations([torch.zeros(4, 8)]).errors
    assert error.norm == 0.0


def test_another_shape_is_no_tensor_in_its_place():
    with pytest.raises(ValueError, match="shapes differ"):
        GoldenTensor(golden(shape=(8, 64))).deviations([torch.zeros(64)])


def test_a_tensor_too_small_for_fp32_stays_as_it_is():
    assert in_fp32(golden(1e-3)).values.dtype is torch.float32
    assert in_fp32(golden(1e-30)).values.dtype is torch.float64
