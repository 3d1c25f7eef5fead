"""LayerNorm and RMSNorm on the CPU kernels, against the same formulas in FP64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from fp64_oracle import pairs_with_formula
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parity import te
from te_on_cpu.enums import DType
from te_on_cpu.graphs import recorded
from te_on_cpu.normalization import layernorm_bwd, layernorm_fwd, rmsnorm_bwd, rmsnorm_bwd_add, rmsnorm_fwd

TE = te.kernels("cpu").te
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS32 = torch.finfo(torch.float32).eps

shapes = st.tuples(st.integers(1, 5), st.sampled_from([8, 40, 256]))
problems = st.tuples(shapes, st.sampled_from(DTYPES), st.booleans(), st.floats(-8, 8), st.integers(0, 2**31))


def draw(problem: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """Return an input with a nonzero mean, gamma, beta, the output's gradient, and whether gamma is zero-centered."""
    (rows, columns), dtype, zero_centered, mean, seed = problem
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=rng) + mean
    gamma, beta, dz = (torch.randn(n, columns, generator=rng).squeeze(0) for n in (1, 1, rows))
    return x.to(dtype), gamma.to(dtype), beta.to(dtype), dz.reshape(rows, columns).to(dtype), zero_centered


def fp64_norm(x: Tensor, gamma: Tensor, beta: Tensor, zero_centered: bool, center: bool) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if center else x
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (gamma + zero_centered) + beta


def assert_rounded_once(actual: Tensor, exact: Tensor, fp32_terms: Tensor | float) -> None:
    """Assert an error of at most half an ulp of the result's dtype plus FP32's eps times ``fp32_terms``."""
    bound = exact.abs() * torch.finfo(actual.dtype).eps / 2 + EPS32 * fp32_terms
    bound += torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps
    excess = ((actual.double() - exact).abs() / bound).max()
    assert excess <= 1, f"{excess:.2f} times the bound"


def terms(x: Tensor, gamma: Tensor, zero_centered: bool) -> Tensor:
    """Return the norm's terms relative to its result, times the log2(n) additions that a sum of n terms takes."""
    spread = x.double().std(-1, keepdim=True, correction=0) + 1e-5
    depth = 8 + math.log2(x.shape[-1])
    return depth * (1 + x.double().abs().amax(-1, keepdim=True) / spread) * (1 + (gamma.double() + zero_centered).abs())


@settings(max_examples=100)
@given(problems, st.booleans())
def test_norms_and_their_gradients_are_those_of_fp64_rounded_once(problem: tuple, center: bool) -> None:
    x, gamma, beta, dz, zero_centered = draw(problem)
    leaves = [t.double().requires_grad_() for t in (x, gamma, beta)]
    exact = fp64_norm(leaves[0], leaves[1], leaves[2] if center else torch.zeros(()), zero_centered, center)
    exact.backward(dz.double())
    if center:
        z, mu, rsigma = layernorm_fwd(x, gamma, beta, 1e-5, None, None, x.dtype, 0, zero_centered)
        assert mu.dtype == torch.float32
        assert mu.shape == x.shape[:1]
        actual = layernorm_bwd(dz, x, mu, rsigma, gamma, 0, zero_centered)
    else:
        z, mu, rsigma = rmsnorm_fwd(x, gamma, 1e-5, None, None, x.dtype, 0, zero_centered)
        assert mu is None
        actual = rmsnorm_bwd(dz, x, rsigma, gamma, 0, zero_centered)
    assert z.dtype == x.dtype
    assert rsigma.dtype == torch.float32
    assert rsigma.shape == x.shape[:1]
    assert_rounded_once(z, exact.detach(), terms(x, gamma, zero_centered) + center * beta.double().abs())
    scale = terms(x, gamma, zero_centered) * (1 + dz.double().abs().amax())
    of_rows = scale * (1 + rsigma.double().unsqueeze(-1)) * math.sqrt(x.shape[-1])
    for gradient, leaf, source, fp32_terms in zip(
        actual, leaves, (x, gamma, beta), (of_rows, scale.sum(), scale.sum()), strict=False
    ):
        assert gradient.dtype == source.dtype
        assert gradient.shape == source.shape
        assert_rounded_once(gradient, leaf.grad, fp32_terms)


def test_norm_adds_one_to_a_zero_centered_gamma_in_fp32() -> None:
    x, tiny = torch.tensor([[1.0, -1.0]]), torch.full((2,), 2.0**-12, dtype=torch.bfloat16)
    z, _, _ = rmsnorm_fwd(x, tiny, 0.0, None, None, torch.float32, 0, True)
    assert z.tolist() == [[1 + 2.0**-12, -1 - 2.0**-12]]


def test_layernorm_subtracts_the_mean_before_it_squares() -> None:
    x = torch.tensor([[4097.0, 4095.0, 4097.0, 4095.0]])
    _, mu, rsigma = layernorm_fwd(x, torch.ones(4), torch.zeros(4), 0.0, None, None, torch.float32, 0, False)
    assert mu.tolist() == [4096.0]
    assert rsigma.tolist() == [1.0]


def test_eps_is_added_to_the_variance() -> None:
    _, _, rsigma = layernorm_fwd(
        torch.full((1, 4), 3.0), torch.ones(4), torch.zeros(4), 0.25, None, None, torch.float32, 0, False
    )
    assert rsigma.tolist() == [2.0]


def test_norm_fills_and_returns_the_given_output() -> None:
    x, out = torch.randn(3, 8), torch.empty(3, 8, dtype=torch.bfloat16)
    z, _, _ = rmsnorm_fwd(x, torch.ones(8), 1e-5, out, None, torch.bfloat16, 0, False)
    assert z is out
    assert torch.equal(out, rmsnorm_fwd(x, torch.ones(8), 1e-5, None, None, torch.bfloat16, 0, False)[0])


def test_norm_takes_tensors_of_any_rank_and_layout() -> None:
    x = torch.randn(8, 3, 2).transpose(0, 2)
    z, mu, rsigma = layernorm_fwd(x, torch.ones(8), torch.zeros(8), 1e-5, None, None, torch.float32, 0, False)
    assert z.shape == (2, 3, 8)
    assert mu.shape == rsigma.shape == (6,)
    torch.testing.assert_close(z, torch.nn.functional.layer_norm(x, (8,)))


def test_norm_of_no_rows_is_empty_and_its_weight_gradients_are_zero() -> None:
    x, gamma = torch.empty(0, 8), torch.ones(8)
    z, mu, rsigma = layernorm_fwd(x, gamma, gamma, 1e-5, None, None, torch.float32, 0, False)
    dx, dgamma, dbeta = layernorm_bwd(z, x, mu, rsigma, gamma, 0, False)
    assert dx.shape == (0, 8)
    assert not dgamma.any()
    assert not dbeta.any()


def test_gradients_of_a_parameter_are_computed_with_autograd_on() -> None:
    x, dz = torch.randn(4, 16), torch.randn(4, 16)
    gamma = torch.nn.Parameter(torch.rand(16))
    mu, rsigma = x.mean(1), x.var(1, unbiased=False).rsqrt()
    for made in (
        recorded(layernorm_bwd)(dz, x, mu, rsigma, gamma, 0, False),
        recorded(rmsnorm_bwd)(dz, x, rsigma, gamma, 0, True),
    ):
        assert not any(one.requires_grad for one in made)


def test_fused_add_joins_before_the_gradient_is_rounded() -> None:
    rng = torch.Generator().manual_seed(0)
    x, dz, add = (torch.randn(64, 32, generator=rng).bfloat16() for _ in range(3))
    gamma = torch.ones(32).bfloat16()
    _, _, rsigma = rmsnorm_fwd(x, gamma, 1e-5, None, None, torch.bfloat16, 0, False)
    fused, dgamma = rmsnorm_bwd_add(dz, x, add, rsigma, gamma, 0, False)
    exact, _ = rmsnorm_bwd(dz.float(), x.float(), rsigma, gamma.float(), 0, False)
    rounded, same_dgamma = rmsnorm_bwd(dz, x, rsigma, gamma, 0, False)
    assert torch.equal(fused, (exact + add).bfloat16())
    assert not torch.equal(fused, rounded + add)
    assert torch.equal(dgamma, same_dgamma)


def test_delayed_scaling_casts_the_fp32_result_and_current_scaling_the_rounded_one() -> None:
    x, gamma = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.ones(32).bfloat16()
    exact, _, _ = rmsnorm_fwd(x, gamma, 1e-5, None, None, torch.float32, 0, False)
    delayed = TE.Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1), DType.kFloat8E4M3)
    fused, _, _ = rmsnorm_fwd(x, gamma, 1e-5, None, delayed, DType.kBFloat16, 0, False)
    assert torch.equal(fused._data, delayed(exact)._data)
    assert not torch.equal(fused._data, delayed(exact.bfloat16())._data)
    assert delayed.amax.item() == exact.abs().max().item()
    current = TE.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cpu"))
    unfused, _, _ = rmsnorm_fwd(x, gamma, 1e-5, None, current, DType.kBFloat16, 0, False)
    assert torch.equal(unfused._data, current(exact.bfloat16())._data)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_te_norm_modules_agree_with_fp64(name: str, dtype: torch.dtype, zero_centered: bool) -> None:
    module = getattr(TE, name)(32, eps=1e-5, params_dtype=dtype, zero_centered_gamma=zero_centered, device="cpu")

    def formula(x: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        return fp64_norm(x, p["weight"], p.get("bias", torch.zeros(())), zero_centered, center=name == "LayerNorm")

    for actual, expected in pairs_with_formula(module, formula, 4, 3, 32, dtype=dtype):
        torch.testing.assert_close(actual.double(), expected, rtol=torch.finfo(dtype).eps, atol=50 * EPS32)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_te_layernorm_linear_agrees_with_fp64(normalization: str, zero_centered: bool) -> None:
    module = TE.LayerNormLinear(32, 16, normalization=normalization, zero_centered_gamma=zero_centered, device="cpu")

    def formula(x: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        beta = p.get("layer_norm_bias", torch.zeros(()))
        z = fp64_norm(x, p["layer_norm_weight"], beta, zero_centered, center=normalization == "LayerNorm")
        return z @ p["weight"].T + p["bias"]

    for actual, expected in pairs_with_formula(module, formula, 8, 32, dtype=torch.float32):
        # TE's FP32 products round each operand to TF32, by at most 2^-11 of its value.
        assert (actual.double() - expected).norm() <= 2 * 2.0**-11 * expected.norm()
