"""The rounding model's account of what GEMM kernels do agrees with the CPU kernels' emulation, which is other code."""

from __future__ import annotations

import pytest
import torch

from parity.cpu import kernel_choices as names
from parity.cpu import tensor_cores
from parity.numerics.formats import e4m3, tf32, tf32_truncated
from parity.numerics.kernel_choices import CHOICES, as_read, in_stored_parts, leaning, lost_in_sums, noisy_sums
from parity.te.precision import PRECISIONS


def matrices(inner: int, mean: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(inner)
    left, right = (torch.randn(48, inner, generator=generator) + mean for _ in range(2))
    return e4m3(left), e4m3(right)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("inner", "mean"), [(1024, 3.0), (4096, 1.0), (1000, 2.0)])
def test_lost_in_sums_is_what_tensor_cores_lose(inner, mean, backward):
    left, right = matrices(inner, mean)
    codes = [(x * (448.0 / x.abs().max())).to(torch.float8_e4m3fn).float() for x in (left, right)]
    factors = [tensor_cores.Factor(x, torch.float8_e4m3fn) for x in codes]
    summed = tensor_cores.product(tensor_cores.HOPPER, factors[1], factors[0], split=backward)
    scale = (left.abs().max() / 448.0) * (right.abs().max() / 448.0)
    expected = (codes[0].double() @ codes[1].double().t() - summed.double()) * scale
    lost = lost_in_sums(left, right.t(), (names.FP8_14_BIT,), backward)
    assert lost is not None
    torch.testing.assert_close(lost.double(), expected, rtol=0.02, atol=1e-4 * expected.abs().max().item())


def test_terms_of_both_signs_lose_next_to_nothing():
    left, right = matrices(1024, 0.0)
    assert lost_in_sums(left, right.t(), (names.FP8_14_BIT,), backward=False) is None


def test_kernels_of_fp32_sums_lose_nothing():
    left, right = matrices(1024, 3.0)
    assert lost_in_sums(left, right.t(), (names.TF32_TRUNCATED,), backward=False) is None


def test_truncation_cuts_toward_zero():
    x = torch.tensor([1.0 + 2.0**-11, -(1.0 + 2.0**-10 + 2.0**-12), 3.0, 0.0])
    assert tf32_truncated(x).tolist() == [1.0, -(1.0 + 2.0**-10), 3.0, 0.0]


def test_operands_are_read_as_the_kernels_read_them():
    rounding = PRECISIONS["fp32"].rounding
    assert as_read(rounding, (names.TF32_TRUNCATED,)).weights is tf32_truncated
    assert as_read(rounding, ()).weights is tf32
    assert as_read(PRECISIONS["bf16"].rounding, (names.TF32_TRUNCATED,)) == PRECISIONS["bf16"].rounding


def test_parts_of_a_sum_are_stored():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(8, 256, generator=generator), torch.randn(256, 8, generator=generator)
    store = lambda x: x.bfloat16().float()  # noqa: E731
    stored = in_stored_parts(left, right, store)
    assert stored is not None
    assert torch.equal(stored, store(stored))
    once, exact = store(left @ right), left.double() @ right.double()
    assert 1.2 < (stored - exact).norm() / (once - exact).norm() < 2.6  # 1.8 on average
    assert in_stored_parts(left[:, :32], right[:32], store) is None


@pytest.mark.parametrize("precision", PRECISIONS)
def test_model_knows_each_choice_of_the_table_that_matters(precision):
    """What makes an error smaller, or none larger by a thousandth, needs no room."""
    needs_none = {names.FP32_EXACT, names.TF32_TIES_AWAY, names.MX_25_BIT}
    of_table = {choice.name for choice in CHOICES if precision in choice.precisions} - needs_none
    rounding = PRECISIONS[precision].rounding
    assert {*leaning(rounding), *noisy_sums(rounding)} == of_table
