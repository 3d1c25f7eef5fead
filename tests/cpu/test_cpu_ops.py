"""TE's fusible operations (``te.ops``) on the CPU kernels, forward and backward, alone and fused."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize, relu, rms_norm, silu

from parity import te

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROWS, WIDTH = 32, 64
# TE's FP32 products round their operands to TF32.
TOLERANCE = {FP32: 2.0**-10, BF16: 2.0**-6, FP16: 2.0**-9}


def operations() -> ModuleType:
    te.kernels("cpu")
    import transformer_engine.pytorch.ops as ops

    return ops


def make_recipe(name: str) -> Any:
    te.kernels("cpu")
    from transformer_engine.common import recipe

    return getattr(recipe, name)()


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """TE gates with the first half of the features."""
    return lambda x: activation(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def tanh_gelu(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


def squared_relu(x: Tensor) -> Tensor:
    return relu(x).square()


WITHOUT_PARAMETERS: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU": tanh_gelu,
    "GEGLU": gated(tanh_gelu),
    "GLU": gated(torch.sigmoid),
    "QGELU": quick_gelu,
    "QGEGLU": gated(quick_gelu),
    "ReLU": relu,
    "ReGLU": gated(relu),
    "SReLU": squared_relu,
    "SReGLU": gated(squared_relu),
    "SiLU": silu,
    "SwiGLU": gated(silu),
    "Identity": lambda x: x,
    "L2Normalization": lambda x: normalize(x, eps=1e-6),
}


def compare(
    ops: list[Any],
    formula: Callable[..., Any],
    dtype: torch.dtype,
    *extra: Tensor,
    width: int = WIDTH,
    tolerance: float | None = None,
    recipe: Any = None,
) -> None:
    """Run operations and a formula in FP64 on the same numbers; outputs, input and parameter gradients agree."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, width, generator=rng).to(dtype).requires_grad_()
    model = operations().Sequential(*ops)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=rng) / parameter.shape[-1] ** 0.5)
    with te.kernels("cpu").te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, *extra)
    leaves = [x, *model.parameters(), *(e for e in extra if e.requires_grad)]
    copies = [leaf.detach().double().requires_grad_() for leaf in leaves]
    others = [e.detach() for e in extra if not e.requires_grad]
    exact = formula(*copies, *others)
    ours, theirs = (y if isinstance(y, tuple) else (y,)), (exact if isinstance(exact, tuple) else (exact,))
    grads = [torch.randn(part.shape, generator=rng).to(part.dtype) for part in ours]
    torch.autograd.backward(ours, grads)
    torch.autograd.backward(theirs, [grad.double() for grad in grads])
    pairs = [*zip(ours, theirs, strict=True), *((a.grad, b.grad) for a, b in zip(leaves, copies, strict=True))]
    for actual, expected in pairs:
        assert actual is not None
        error = (actual.double() - expected).norm()
        assert error <= (TOLERANCE[dtype] if tolerance is None else tolerance) * expected.norm()


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("name", WITHOUT_PARAMETERS)
def test_an_operation_without_parameters_is_its_formula(name: str, dtype: torch.dtype) -> None:
    compare([getattr(operations(), name)()], WITHOUT_PARAMETERS[name], dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_norms_linear_and_bias_are_their_formulas(dtype: torch.dtype) -> None:
    ops, options = operations(), {"device": "cpu", "dtype": dtype}
    compare([ops.LayerNorm(WIDTH, **options)], lambda x, w, b: layer_norm(x, (WIDTH,), w, b, 1e-5), dtype)
    compare([ops.RMSNorm(WIDTH, **options)], lambda x, w: rms_norm(x, (WIDTH,), w, 1e-5), dtype)
    compare([ops.Linear(WIDTH, 48, **options)], linear, dtype)
    compare([ops.BasicLinear(WIDTH, 48, **options)], linear, dtype)
    compare([ops.Bias(WIDTH, **options)], lambda x, b: x + b, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_operations_that_move_and_scale_are_their_formulas(dtype: torch.dtype) -> None:
    ops = operations()
    other = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    compare([ops.ConstantScale(0.5)], lambda x: 0.5 * x, dtype)
    compare([ops.Reshape((-1, 16))], lambda x: x.view(-1, 16), dtype)
    compare([ops.AddExtraInput()], lambda x, e: x + e, dtype, other)
    compare([ops.MakeExtraOutput()], lambda x: (x, x), dtype)


def test_scaled_swiglu_multiplies_each_row() -> None:
    scales = torch.rand(ROWS, requires_grad=True)
    formula = gated(silu)
    compare([operations().ScaledSwiGLU()], lambda x, s: formula(x) * s[:, None], FP32, scales)


@pytest.mark.parametrize("recipe_name", [None, "DelayedScaling", "Float8CurrentScaling"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_grouped_linear_is_a_linear_for_each_group(dtype: torch.dtype, recipe_name: str | None) -> None:
    splits = torch.tensor([16, 0, 16])
    module = operations().GroupedLinear(3, WIDTH, 48, device="cpu", dtype=dtype)
    names = [name for name, _ in module.named_parameters()]

    def formula(x: Tensor, *rest: Tensor) -> Tensor:
        p = dict(zip(names, rest, strict=False))
        parts = enumerate(x.split(splits.tolist()))
        return torch.cat([linear(part, p[f"weight{i}"], p[f"bias{i}"]) for i, part in parts])

    if recipe_name is None:
        compare([module], formula, dtype, splits)
    else:
        compare([module], formula, dtype, splits, tolerance=0.1, recipe=make_recipe(recipe_name))


# Sequences that TE fuses: in the forward pass (linear, bias, activation, addition), in the backward pass (bias and
# activation; norm and addition), and both.


def fused_sequences(dtype: torch.dtype) -> dict[str, tuple[list[Any], Callable[..., Any], int]]:
    """Operations, formula, and how many extra inputs there are."""
    ops, options = operations(), {"device": "cpu", "dtype": dtype}

    def make_linear(bias: bool = True) -> Any:
        return ops.Linear(WIDTH, WIDTH, bias=bias, **options)

    return {
        "linear bias add": ([make_linear(), ops.AddExtraInput()], lambda x, w, b, e: linear(x, w, b) + e, 1),
        "linear scale add": (
            [make_linear(False), ops.ConstantScale(0.5), ops.AddExtraInput()],
            lambda x, w, e: 0.5 * linear(x, w) + e,
            1,
        ),
        "extra output linear": ([ops.MakeExtraOutput(), make_linear()], lambda x, w, b: (linear(x, w, b), x), 0),
        "extra output norm": (
            [ops.MakeExtraOutput(), ops.RMSNorm(WIDTH, **options)],
            lambda x, w: (rms_norm(x, (WIDTH,), w, 1e-5), x),
            0,
        ),
        "linear activation linear": (
            [make_linear(), ops.GELU(), make_linear()],
            lambda x, w, b, v, c: linear(tanh_gelu(linear(x, w, b)), v, c),
            0,
        ),
        "norm mlp": (
            [ops.LayerNorm(WIDTH, **options), make_linear(False), ops.SwiGLU(), ops.Linear(WIDTH // 2, 48, **options)],
            lambda x, g, h, w, v, c: linear(gated(silu)(linear(layer_norm(x, (WIDTH,), g, h, 1e-5), w)), v, c),
            0,
        ),
    }


NAMES = ["linear bias add", "linear scale add", "extra output linear", "extra output norm", "linear activation linear"]
NAMES += ["norm mlp"]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", NAMES)
def test_fused_sequences_are_their_formulas(name: str, dtype: torch.dtype) -> None:
    ops, formula, extras = fused_sequences(dtype)[name]
    inputs = [torch.randn(ROWS, WIDTH).to(dtype).requires_grad_() for _ in range(extras)]
    compare(ops, formula, dtype, *inputs)


@pytest.mark.parametrize("recipe_name", ["DelayedScaling", "Float8CurrentScaling"])
@pytest.mark.parametrize("name", NAMES)
def test_fused_sequences_in_fp8_err_by_the_rounding_of_fp8(name: str, recipe_name: str) -> None:
    ops, formula, extras = fused_sequences(BF16)[name]
    inputs = [torch.randn(ROWS, WIDTH).to(BF16).requires_grad_() for _ in range(extras)]
    # E5M2 has 2 mantissa bits: gradients are rounded by up to 1/8, twice where there are two products.
    compare(ops, formula, BF16, *inputs, tolerance=0.15, recipe=make_recipe(recipe_name))


@pytest.mark.parametrize("recipe_name", ["DelayedScaling", "Float8CurrentScaling"])
def test_linear_operation_and_linear_module_are_the_same_to_the_bit(recipe_name: str) -> None:
    te_module = te.kernels("cpu").te
    module = te_module.Linear(WIDTH, 48, params_dtype=BF16, device="cpu")
    operation = operations().Linear(WIDTH, 48, dtype=BF16, device="cpu")
    operation.weight.data.copy_(module.weight)
    operation.bias.data.copy_(module.bias)
    x, grad, results = torch.randn(ROWS, WIDTH).to(BF16), torch.randn(ROWS, 48).to(BF16), []
    for candidate in (module, operation):
        fp8 = make_recipe(recipe_name)
        inp = x.clone().requires_grad_()
        with te_module.autocast(enabled=True, recipe=fp8):
            y = candidate(inp)
        y.backward(grad)
        results.append((y, inp.grad, candidate.weight.grad, candidate.bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
