"""Activations on the CPU kernels, against their definitions in FP64 and their gradients by autograd."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from activation_oracle import DEFINITIONS, GATED, PLAIN, halves
from fp64_oracle import pairs_with_formula
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parity import te
from te_on_cpu import activation
from te_on_cpu.enums import DType

TE = te.kernels("cpu").te
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS32 = torch.finfo(torch.float32).eps


GRADIENTS = {name: f"d{name}" for name in DEFINITIONS} | {"clamped_swiglu": "clamped_dswiglu"}

problems = st.tuples(
    st.sampled_from(DTYPES), st.integers(1, 4), st.sampled_from([2, 6, 64]), st.floats(0.1, 4), st.integers(0, 2**31)
)


def draw(problem: tuple, name: str) -> tuple[Tensor, Tensor]:
    """Return an input without values on a kink, and a gradient of the output."""
    dtype, rows, columns, spread, seed = problem
    rng = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, columns, generator=rng) * spread).to(dtype)
    x = torch.where((x == 0) | (x.abs() == 7), torch.ones((), dtype=dtype), x)
    return x, torch.randn(rows, columns // (2 if name in GATED else 1), generator=rng).to(dtype)


def assert_rounded_once(actual: Tensor, exact: Tensor, fp32_scale: Tensor) -> None:
    """Assert an error of at most half an ulp of the result's dtype plus a few FP32 ulps of ``fp32_scale``."""
    info = torch.finfo(actual.dtype)
    bound = info.eps / 2 * exact.abs() + 8 * EPS32 * fp32_scale + info.smallest_normal * info.eps
    excess = ((actual.double() - exact).abs() / bound).max().item()
    assert excess <= 1, f"{excess:.2f} times the bound"


def fp32_scale(name: str, x: Tensor, gradient: Tensor | None = None) -> Tensor:
    """Return, for each row of ``x``, how many eps the relative error of exp, about |x| eps, can move the function."""
    largest = x.double().abs().amax(-1, keepdim=True)
    scale = (1 + largest) ** (3 if name in GATED or name.startswith("s") else 2)
    return scale if gradient is None else scale * gradient.double().abs().amax(-1, keepdim=True)


@pytest.mark.parametrize("name", DEFINITIONS)
@settings(max_examples=25)
@given(problem=problems)
def test_activation_and_gradient_are_those_of_the_definition_rounded_once(name: str, problem: tuple) -> None:
    x, gradient = draw(problem, name)
    leaf = x.double().requires_grad_()
    exact = DEFINITIONS[name](leaf)
    exact.backward(gradient.double())
    actual = getattr(activation, name)(x, None)
    of_x = getattr(activation, GRADIENTS[name])(gradient, x, None)
    assert actual.dtype == of_x.dtype == x.dtype
    assert actual.is_contiguous()
    assert of_x.shape == x.shape
    assert_rounded_once(actual, exact.detach(), fp32_scale(name, x))
    assert_rounded_once(of_x, leaf.grad, fp32_scale(name, x, gradient))


def test_the_gate_is_the_first_half() -> None:
    gate_one_up_zero = torch.tensor([[1.0, 0.0]])
    assert activation.swiglu(gate_one_up_zero, None).item() == 0
    assert activation.dswiglu(torch.ones(1, 1), gate_one_up_zero, None)[0, 0] == 0


def test_gelu_is_the_tanh_approximation() -> None:
    x = torch.linspace(-3, 3, 61)
    assert torch.equal(activation.gelu(x, None), torch.nn.functional.gelu(x, approximate="tanh"))


def test_relu_turns_nan_into_zero_as_cuda_does() -> None:
    assert activation.relu(torch.tensor([float("nan"), -1.0, 2.0]), None).tolist() == [0, 0, 2]


def test_clamped_swiglu_holds_the_gate_from_above_only_and_up_on_both_sides() -> None:
    x = torch.tensor([[-3.0, 3.0, 1.0, 1.0], [0.5, 0.5, -3.0, 3.0]])
    gradient = activation.clamped_dswiglu(torch.ones(2, 2), x, None, limit=2.0)
    assert (gradient == 0).tolist() == [[False, True, False, False], [False, False, True, True]]


def test_a_value_on_the_limit_is_not_held() -> None:
    gradient = activation.clamped_dswiglu(torch.ones(1, 2), torch.tensor([[2.0, 1.0, 1.0, -2.0]]), None, limit=2.0)
    assert (gradient != 0).all()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("clamped_swiglu", (0.5, 1.0, 0.0)), ("clamped_swiglu", (2.0, 1.702, 1.0)), ("situglu", (1.5, 2.5))],
)
def test_limit_alpha_and_offset_or_both_betas_are_parameters(name: str, parameters: tuple[float, ...]) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)) * 2
    exact = halves(GATED[name], *parameters)(x.double())
    torch.testing.assert_close(getattr(activation, name)(x, None, *parameters).double(), exact, rtol=1e-6, atol=1e-6)


def test_odd_columns_have_no_halves() -> None:
    with pytest.raises(ValueError, match="7 columns do not hold pairs"):
        activation.swiglu(torch.ones(2, 7), None)


def test_no_rows_give_no_rows() -> None:
    assert activation.swiglu(torch.empty(0, 8), None).shape == (0, 4)
    assert activation.dswiglu(torch.empty(0, 4), torch.empty(0, 8), None).shape == (0, 8)


SCALED = {
    "swiglu": "scaled_dswiglu",
    "situglu": "scaled_dsituglu",
    "clamped_swiglu": "scaled_clamped_dswiglu",
    "srelu": "scaled_dsrelu",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCALED)
def test_scaled_activation_multiplies_rows_before_it_rounds(name: str, dtype: torch.dtype) -> None:
    backward = getattr(activation, SCALED[name])
    rng = torch.Generator().manual_seed(0)
    x, scales = torch.randn(3, 2, 64, generator=rng).to(dtype), torch.rand(3, 2, generator=rng)
    gradient = torch.randn(3, 2, 64 if name == "srelu" else 32, generator=rng).to(dtype)
    x64, scales64 = x.double().requires_grad_(), scales.double().requires_grad_()
    exact = DEFINITIONS[name](x64) * scales64.unsqueeze(-1)
    exact.backward(gradient.double())
    actual = getattr(activation, f"scaled_{name}")(x, scales, None)
    of_x, of_scales = backward(gradient, x, scales, None)
    assert_rounded_once(actual, exact.detach(), fp32_scale(name, x))
    assert_rounded_once(of_x, x64.grad, fp32_scale(name, x, gradient))
    assert of_scales.dtype == torch.float32
    assert of_scales.shape == scales.shape
    torch.testing.assert_close(of_scales.double(), scales64.grad, rtol=1e-5, atol=1e-5)
    assert backward(gradient, x, scales, None, compute_scale_grad=False)[1] is None


def test_interleaved_gate_and_up_alternate_in_blocks() -> None:
    rng = torch.Generator().manual_seed(0)
    blocks, scales = torch.randn(5, 2, 2, 32, generator=rng), torch.rand(5, generator=rng)
    interleaved, halves = blocks.flatten(1), blocks.transpose(1, 2).flatten(1)
    gradient = torch.randn(5, 64, generator=rng)
    assert torch.equal(
        activation.scaled_swiglu(interleaved, scales, None, 32),
        activation.scaled_swiglu(halves, scales, None),
    )
    of_interleaved, _ = activation.scaled_dswiglu(gradient, interleaved, scales, None, 32)
    of_halves, _ = activation.scaled_dswiglu(gradient, halves, scales, None)
    assert torch.equal(of_interleaved.view(5, 2, 2, 32), of_halves.view(5, 2, 2, 32).transpose(1, 2))


def test_scaled_activation_wants_one_scale_a_row() -> None:
    with pytest.raises(ValueError, match="3 rows and 2 scales"):
        activation.scaled_srelu(torch.ones(3, 4), torch.ones(2), None)


@pytest.mark.parametrize("name", PLAIN)
def test_bias_gradient_is_the_sum_of_the_rounded_gradient(name: str) -> None:
    rng = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(4, 8, 16, generator=rng).bfloat16() for _ in range(2))
    of_bias, of_x = getattr(activation, f"dbias_d{name}")(gradient, x, None)
    assert torch.equal(of_x, getattr(activation, f"d{name}")(gradient, x, None))
    assert torch.equal(of_bias, of_x.double().sum((0, 1)).bfloat16())


def test_delayed_scaling_casts_and_sums_the_fp32_gradient() -> None:
    rng = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(32, 16, generator=rng).bfloat16() for _ in range(2))
    exact = activation.dgelu(gradient.float(), x.float(), None)
    quantizer = TE.Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1), DType.kFloat8E4M3)
    of_bias, of_x = activation.dbias_dgelu(gradient, x, quantizer)
    assert torch.equal(of_x._data, quantizer(exact)._data)
    assert torch.equal(of_bias, exact.double().sum(0).bfloat16())
    assert not torch.equal(of_bias, exact.bfloat16().double().sum(0).bfloat16())


MLP_ACTIVATIONS = sorted(set(DEFINITIONS) - {"situglu"})


@pytest.mark.parametrize("name", MLP_ACTIVATIONS)
def test_te_layernorm_mlp_agrees_with_fp64_for_every_activation(name: str) -> None:
    module = TE.LayerNormMLP(16, 32, activation=name, device="cpu")

    def formula(x: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        hidden = torch.nn.functional.layer_norm(x, (16,), p["layer_norm_weight"], p["layer_norm_bias"], 1e-5)
        hidden = DEFINITIONS[name](hidden @ p["fc1_weight"].T + p["fc1_bias"])
        return hidden @ p["fc2_weight"].T + p["fc2_bias"]

    for actual, expected in pairs_with_formula(module, formula, 8, 16, dtype=torch.float32):
        # TE's FP32 products round each operand to TF32, by at most 2^-11 of its value.
        assert (actual.double() - expected).norm() <= 3 * 2.0**-11 * expected.norm()
