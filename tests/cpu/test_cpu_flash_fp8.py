"""The arithmetic of FP8 attention, block by block: what is cast, with which scale, and which amaxes are taken."""

from __future__ import annotations

import fp8_attention_oracle as oracle
import pytest
import torch
from attention_oracle import visible
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parity.cpu import attention_problem, flash_fp8, float8
from parity.cpu.attention_problem import Attention, Band
from parity.cpu.flash_fp8 import Cast, Operand

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALE = 0.25
# Sums of at most 64 products in FP32, in units of what is summed.
FP32_SUM = 64 * 2.0**-24

sides = st.none() | st.integers(0, 12)
powers = st.integers(-6, 8).map(lambda exponent: 2.0**exponent)


def operand(dtype: torch.dtype, shape: tuple[int, ...], seed: int, descale: float) -> Operand:
    """Normal deviates as codes, which stand for ``descale`` times as much."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return Operand(float8.rounded(values / descale, dtype), descale)


def value(of: Operand) -> Tensor:
    return of.values.double() * of.descale


def assert_within(actual: Tensor, exact: Tensor, bound: Tensor) -> None:
    assert ((actual.double() - exact).abs() <= bound * (1 + 2.0**-10) + FP32_SUM * (1 + exact.abs().amax())).all()


@settings(max_examples=60)
@given(
    st.builds(Band, sides, sides, st.booleans()),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.integers(1, 40),
    st.integers(1, 40),
    st.lists(powers, min_size=4, max_size=4),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_results_are_off_by_no_more_than_the_casts_of_p_and_ds(
    band: Band, heads: tuple[int, int], queries: int, keys: int, descales: list[float], small_blocks: bool, seed: int
) -> None:
    shapes = [(2, heads[0], queries, 16), (2, heads[1], keys, 16), (2, heads[1], keys, 24), (2, heads[0], queries, 24)]
    dtypes = (E4M3, E4M3, E4M3, E5M2)
    q, k, v, do = (operand(*kind, seed, descale) for *kind, descale in zip(dtypes, shapes, descales, strict=True))
    attention = Attention(scale=SCALE, band=band)
    s_cast, dp_cast = Cast(E4M3, 256.0), Cast(E5M2, 64.0)
    offset = keys - queries if band.bottom_right else 0
    seen = visible(queries, keys, band.left, band.right, offset)
    with pytest.MonkeyPatch.context() as patch:
        if small_blocks:
            patch.setattr(attention_problem, "_SCORES_IN_A_BLOCK", 1)
        result = flash_fp8.forward(q, k, v, attention, s_cast)
        o = Operand(result.output, 1.0)
        gradients, amax = flash_fp8.backward(q, k, v, o, do, result.lse, attention, s_cast, dp_cast)
    exact = oracle.forward(value(q), value(k), value(v), seen, SCALE, s_cast.scale)
    assert_within(result.output, exact.values["o"], exact.bounds["o"])
    torch.testing.assert_close(result.amax.double(), exact.amax, rtol=1e-5, atol=0)
    scales = (SCALE, s_cast.scale, dp_cast.scale)
    exact = oracle.backward(value(q), value(k), value(v), result.output, value(do), seen, *scales)
    for actual, name in ((gradients.query, "dq"), (gradients.key, "dk"), (gradients.value, "dv")):
        assert_within(actual, exact.values[name], exact.bounds[name])
    torch.testing.assert_close(amax.double(), exact.amax, rtol=1e-4, atol=1e-6)


def two_keys(score: float) -> tuple[Operand, Operand]:
    """A query whose scores are 0 and ``score``."""
    query = Operand(torch.ones(1, 1, 1, 1), 1.0)
    return query, Operand(torch.tensor([0.0, score]).view(1, 1, 2, 1), 1.0)


def test_normalised_probabilities_are_cast_with_their_scale_and_their_sum_is_not() -> None:
    query, key = two_keys(1.0)
    value = Operand(torch.tensor([1.0, 0.0]).view(1, 1, 2, 1), 2.0)
    cast = Cast(E4M3, 100.0)
    probability = torch.tensor(-1.0).sigmoid()
    result = flash_fp8.forward(query, key, value, Attention(1.0, Band(None, None, False)), cast)
    expected = (probability * 100).to(E4M3).float() / 100 * 2
    assert result.output.item() == pytest.approx(expected.item(), rel=1e-6)
    assert abs(expected - 2 * probability) > 0.01
    assert result.lse.item() == pytest.approx(torch.tensor([0.0, 1.0]).logsumexp(0).item(), rel=1e-6)
    assert result.amax.item() == pytest.approx(1 - probability.item(), rel=1e-6)


def test_probabilities_beyond_the_scales_range_saturate() -> None:
    query, key = two_keys(-100.0)
    value = Operand(torch.tensor([1.0, 0.0]).view(1, 1, 2, 1), 1.0)
    result = flash_fp8.forward(query, key, value, Attention(1.0, Band(None, None, False)), Cast(E4M3, 1000.0))
    assert result.output.item() == pytest.approx(0.448, rel=1e-6)
    assert result.amax.item() == 1.0


def test_ds_is_cast_with_its_scale_for_its_products_with_q_and_k() -> None:
    query, key = two_keys(1.0)
    values = Operand(torch.tensor([1.0, 0.0]).view(1, 1, 2, 1), 1.0)
    attention, s_cast, dp_cast = Attention(0.5, Band(None, None, False)), Cast(E4M3, 1.0), Cast(E5M2, 3.0)
    do, o = Operand(torch.ones(1, 1, 1, 1), 4.0), Operand(torch.ones(1, 1, 1, 1), 0.25)
    lse = torch.tensor([0.0, 0.5]).logsumexp(0).view(1, 1, 1, 1)
    gradients, amax = flash_fp8.backward(query, key, values, o, do, lse, attention, s_cast, dp_cast)
    p = torch.tensor([0.0, 0.5]).softmax(0)
    # dP is 4 and 0, and the sum of dO O is 1.
    ds = p * (torch.tensor([4.0, 0.0]) - 1) * 0.5
    cast = (ds * 3).to(E5M2).float() / 3
    assert gradients.query.item() == pytest.approx(cast[1].item(), rel=1e-6)
    assert gradients.key.flatten().tolist() == pytest.approx(cast.tolist(), rel=1e-6)
    assert amax.item() == pytest.approx(ds.abs().amax().item(), rel=1e-6)


def test_a_sink_takes_its_part_and_gets_a_gradient() -> None:
    query, key = two_keys(1.0)
    value, do = Operand(torch.ones(1, 1, 2, 1), 1.0), Operand(torch.ones(1, 1, 1, 1), 1.0)
    attention = Attention(1.0, Band(None, None, False), sink=torch.tensor([2.0]))
    cast = Cast(E4M3, 1.0)
    result = flash_fp8.forward(query, key, value, attention, cast)
    p = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    assert result.amax.item() == pytest.approx(p[1].item(), rel=1e-6)
    assert result.output.item() == pytest.approx(p[:2].to(E4M3).float().sum().item(), rel=1e-6)
    output = Operand(p[:2].sum().view(1, 1, 1, 1), 1.0)
    gradients, _ = flash_fp8.backward(query, key, value, output, do, result.lse, attention, cast, Cast(E5M2, 1.0))
    assert gradients.sink is not None
    assert gradients.sink.item() == pytest.approx(-(p[2] * p[:2].sum()).item(), rel=1e-5)


def test_backward_of_dropout_uses_the_mask_of_the_forward() -> None:
    shape = (1, 2, 16, 16)
    q, k, do = (operand(dtype, shape, seed, 1.0) for seed, dtype in enumerate((E4M3, E4M3, E5M2)))
    v = operand(E4M3, shape, 3, 1.0)
    attention = Attention(SCALE, Band(None, None, False), dropout=0.5, seed=7)
    cast = Cast(E4M3, 64.0)
    result = flash_fp8.forward(q, k, v, attention, cast)
    gradients, _ = flash_fp8.backward(
        q, k, v, Operand(result.output, 1.0), do, result.lse, attention, cast, Cast(E5M2, 1.0)
    )
    # The output is linear in the value, whose gradient therefore gives the same inner product as the output.
    by_output = (result.output.double() * value(do)).sum().item()
    assert (gradients.value.double() * value(v)).sum().item() == pytest.approx(by_output, rel=1e-4)
