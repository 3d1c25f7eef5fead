"""TE's fusible operations (``te.ops``), forward and backward, in each precision and under every recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from activation_oracle import DEFINITIONS, clamped_swiglu, gelu, halves
from emulated_gpu import emulated
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import layer_norm, linear, normalize, relu, rms_norm

from parity import te
from parity.numerics import formats
from te_on_cpu import cuda

TE = te.kernels("cpu").te
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROWS, WIDTH = 32, 64
# TE's FP32 products round their operands to TF32.
TOLERANCE = {FP32: 2.0**-10, BF16: 2.0**-6, FP16: 2.0**-9}


def operations() -> ModuleType:
    te.kernels("cpu")
    import transformer_engine.pytorch.ops as ops

    return ops


def compare(
    ops: list[Any],
    formula: Callable[..., Any],
    dtype: torch.dtype,
    *extra: Tensor,
    rows: int = ROWS,
    width: int = WIDTH,
    tolerance: float | None = None,
    recipe: Any = None,
) -> None:
    """Assert that operations and a formula in FP64 have the same outputs, input gradients and parameter gradients.

    Args:
        formula: takes the input, the parameters, and the extra inputs, those that require a gradient first.
        tolerance: of the relative error of each output and gradient in the Euclidean norm. Default: that of the dtype.
    """
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=rng).to(dtype).requires_grad_()
    model = operations().Sequential(*ops)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=rng) / parameter.shape[-1] ** 0.5)
    leaves = [x, *model.parameters(), *(e for e in extra if e.requires_grad)]
    # In-place operations write into extra inputs and gradients, so the formula gets copies made before.
    copies = [leaf.detach().double().requires_grad_() for leaf in leaves]
    others = [e.detach().clone() for e in extra if not e.requires_grad]
    with te.kernels("cpu").te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, *extra)
    exact = formula(*copies, *others)
    ours, theirs = (y if isinstance(y, tuple) else (y,)), (exact if isinstance(exact, tuple) else (exact,))
    grads = [torch.randn(part.shape, generator=rng).to(part.dtype) for part in ours]
    torch.autograd.backward(theirs, [grad.double() for grad in grads])
    torch.autograd.backward(ours, grads)
    pairs = [*zip(ours, theirs, strict=True), *((a.grad, b.grad) for a, b in zip(leaves, copies, strict=True))]
    for actual, expected in pairs:
        error = (actual.double() - expected).norm()
        assert error <= (TOLERANCE[dtype] if tolerance is None else tolerance) * expected.norm()


def make_recipe(name: str) -> Any:
    te.kernels("cpu")
    from transformer_engine.common import recipe

    return getattr(recipe, name)()


def sequences(dtype: torch.dtype) -> dict[str, tuple[list[Any], Callable[..., Any], int]]:
    """Return operations alone, and sequences that TE fuses in the forward pass, in the backward pass, or in both.

    Returns:
        By name: operations, formula, and the number of extra inputs.
    """
    ops, options = operations(), {"device": "cpu", "dtype": dtype}
    size, swiglu = (WIDTH,), DEFINITIONS["swiglu"]

    def make_linear(bias: bool = True) -> Any:
        return ops.Linear(WIDTH, WIDTH, bias=bias, **options)

    norm, add = ops.LayerNorm(WIDTH, **options), ops.AddExtraInput(in_place=True)
    mlp = [norm, make_linear(False), ops.SwiGLU(), ops.Linear(WIDTH // 2, WIDTH, **options)]
    return {
        "linear bias add": ([make_linear(), add], lambda x, w, b, e: linear(x, w, b) + e, 1),
        "linear scale add": (
            [make_linear(False), ops.ConstantScale(0.5), add],
            lambda x, w, e: 0.5 * linear(x, w) + e,
            1,
        ),
        "extra output linear": (
            [ops.MakeExtraOutput(in_place=True), make_linear()],
            lambda x, w, b: (linear(x, w, b), x),
            0,
        ),
        "extra output norm": (
            [ops.MakeExtraOutput(), ops.RMSNorm(WIDTH, **options)],
            lambda x, w: (rms_norm(x, size, w, 1e-5), x),
            0,
        ),
        "linear activation linear": (
            [make_linear(), ops.GELU(), make_linear()],
            lambda x, w, b, v, c: linear(gelu(linear(x, w, b)), v, c),
            0,
        ),
        "norm mlp": (
            mlp,
            lambda x, g, h, w, v, c: linear(swiglu(linear(layer_norm(x, size, g, h, 1e-5), w)), v, c),
            0,
        ),
        "layer norm": ([norm], lambda x, w, b: layer_norm(x, size, w, b, 1e-5), 0),
        "rms norm": ([ops.RMSNorm(WIDTH, **options)], lambda x, w: rms_norm(x, size, w, 1e-5), 0),
        "linear": ([ops.Linear(WIDTH, 48, **options)], linear, 0),
        "basic linear": ([ops.BasicLinear(WIDTH, 48, **options)], linear, 0),
        "bias": ([ops.Bias(WIDTH, **options)], lambda x, b: x + b, 0),
        "constant scale": ([ops.ConstantScale(0.5)], lambda x: 0.5 * x, 0),
        "reshape": ([ops.Reshape((-1, 16))], lambda x: x.view(-1, 16), 0),
        "add extra input": ([ops.AddExtraInput()], lambda x, e: x + e, 1),
        "make extra output": ([ops.MakeExtraOutput()], lambda x: (x, x), 0),
    }


# By sequence: one of the operations that TE makes of it in the forward pass, and one in the backward pass.
FUSIONS = {
    "linear bias add": ("ForwardLinearBiasAdd", "BasicLinear"),
    "linear scale add": ("ForwardLinearScaleAdd", "BackwardLinearScale"),
    "extra output linear": ("MakeExtraOutput", "BackwardLinearAdd"),
    "extra output norm": ("MakeExtraOutput", "BackwardAddRMSNorm"),
    "linear activation linear": ("ForwardLinearBiasActivation", "BackwardActivationBias"),
    "norm mlp": ("LayerNorm", "SwiGLU"),
}
DTYPES = [FP32, BF16, FP16]

ACTIVATIONS = (
    "GELU",
    "GEGLU",
    "GLU",
    "QGELU",
    "QGEGLU",
    "ReLU",
    "ReGLU",
    "SReLU",
    "SReGLU",
    "SiLU",
    "SwiGLU",
    "SiTUGLU",
)
WITHOUT_PARAMETERS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: DEFINITIONS[name.lower()] for name in ACTIVATIONS},
    "ClampedSwiGLU": DEFINITIONS["clamped_swiglu"],
    "Identity": lambda x: x,
    "L2Normalization": lambda x: normalize(x, eps=1e-6),
}
# Scaled activations: their options, and the function whose rows they multiply by factors.
SCALED: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "ScaledSwiGLU": ({}, DEFINITIONS["swiglu"]),
    "ScaledSReLU": ({}, DEFINITIONS["srelu"]),
    "ScaledTanhSReLU": ({"tanh_clamp_scale": 2.0}, lambda x: (2 * (relu(x) / 2).tanh()).square()),
    "ScaledSiTUGLU": ({}, DEFINITIONS["situglu"]),
    "ScaledClampedQGeGLU": ({"limit": 1.0}, halves(clamped_swiglu, 1.0)),
}


def operation(name: str, **options: Any) -> Any:
    if not hasattr(operations(), name):
        pytest.skip(f"TransformerEngine {te.version()} has no operation {name}")
    return getattr(operations(), name)(**options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WITHOUT_PARAMETERS)
def test_an_operation_without_parameters_is_its_formula(name: str, dtype: torch.dtype) -> None:
    compare([operation(name)], WITHOUT_PARAMETERS[name], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCALED)
def test_a_scaled_activation_multiplies_each_row(name: str, dtype: torch.dtype) -> None:
    options, function = SCALED[name]
    scales = torch.rand(ROWS, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    compare([operation(name, **options)], lambda x, s: function(x) * s[:, None], dtype, scales)


def experts(names: list[str], parameters: Sequence[Tensor], x: Tensor, splits: Tensor) -> Tensor:
    """Return what a linear of its own computes from each part of the rows."""
    p = dict(zip(names, parameters, strict=False))
    parts = enumerate(x.split(splits.tolist()))
    return torch.cat([linear(part, p[f"weight{i}"], p[f"bias{i}"]) for i, part in parts])


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_linear_is_a_linear_for_each_group(dtype: torch.dtype) -> None:
    splits = torch.tensor([16, 0, 16])
    module = operations().GroupedLinear(3, WIDTH, 48, device="cpu", dtype=dtype)
    names = [name for name, _ in module.named_parameters()]
    compare([module], lambda x, *rest: experts(names, rest, x, splits), dtype, splits)


def compare_sequence(name: str, dtype: torch.dtype, **options: Any) -> None:
    ops, formula, extras = sequences(dtype)[name]
    inputs = [torch.randn(ROWS, WIDTH).to(dtype).requires_grad_() for _ in range(extras)]
    compare(ops, formula, dtype, *inputs, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sequences(FP32))
def test_operations_and_fused_sequences_are_their_formulas(name: str, dtype: torch.dtype) -> None:
    compare_sequence(name, dtype)


# By recipe: the GPU that supports it, and the roundings of operands, as a comparison's expected error models them.
RECIPES: dict[str, tuple[str, tuple[Callable[[Tensor, int], Tensor], ...]]] = {
    "DelayedScaling": ("HOPPER", (formats.e4m3, formats.e5m2)),
    "Float8CurrentScaling": ("HOPPER", (formats.e4m3, formats.e5m2)),
    "Float8BlockScaling": ("HOPPER", (formats.e4m3_blocks(128),)),
    "MXFP8BlockScaling": ("BLACKWELL", (formats.e4m3_blocks(32),)),
    "NVFP4BlockScaling": ("BLACKWELL", (formats.nvfp4_blocks, formats.nvfp4_stochastic)),
}
NEW_IN_2_18 = pytest.mark.skipif(
    Version(te.version()) < Version("2.18"), reason="TransformerEngine's operations refuse it before 2.18"
)


@pytest.fixture(
    params=[pytest.param(name, marks=NEW_IN_2_18 if name == "Float8BlockScaling" else ()) for name in RECIPES]
)
def recipe(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the name of a recipe, on an emulated GPU that supports it."""
    with emulated(getattr(cuda, RECIPES[request.param][0])):
        yield request.param


def tolerance_of(recipe: str) -> float:
    """Return the error allowed after two products in a row, each of two rounded operands.

    Roundings are independent. A weight's gradient has the most, six: those of its own two operands, and two that the
    products left in each of these. Each has the relative size of a rounding of normally distributed numbers.
    """
    torch.manual_seed(0)
    values = torch.randn(128, 128)
    worst = max(((rounded(values, 1) - values).norm() / values.norm()).item() for rounded in RECIPES[recipe][1])
    return 6**0.5 * worst + 2.0**-6


@pytest.mark.parametrize("name", FUSIONS)
def test_fused_sequences_err_by_the_rounding_of_the_recipe(name: str, recipe: str) -> None:
    compare_sequence(name, BF16, tolerance=tolerance_of(recipe), recipe=make_recipe(recipe))


@pytest.mark.parametrize("name", FUSIONS)
def test_te_fuses_what_the_sequences_are_for(name: str) -> None:
    ops, _, extras = sequences(BF16)[name]
    model = operations().Sequential(*ops)
    inputs = [torch.randn(ROWS, WIDTH).to(BF16).requires_grad_() for _ in range(1 + extras)]
    with te.kernels("cpu").te.autocast(enabled=True, recipe=make_recipe("DelayedScaling")):
        model(*inputs)
    fuser = model._module_groups[0]
    forward, backward = ({type(op).__name__ for op, _ in found} for found in (fuser._forward_ops, fuser._backward_ops))
    assert FUSIONS[name][0] in forward
    assert FUSIONS[name][1] in backward


def results_of(candidate: Any, parameters: Sequence[Tensor], recipe: str, features: int) -> list[Tensor]:
    """Return the output and the gradients of one step, with the same seeds each time."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=rng).to(BF16).requires_grad_()
    torch.manual_seed(0)  # NVFP4 rounds gradients stochastically
    with TE.autocast(enabled=True, recipe=make_recipe(recipe)):
        y = candidate(x)
    y.backward(torch.randn(ROWS, features, generator=rng).to(BF16))
    return [y, x.grad, *(parameter.grad for parameter in parameters)]


def test_linear_operation_and_linear_module_are_the_same_to_the_bit(recipe: str) -> None:
    module = TE.Linear(WIDTH, 96, params_dtype=BF16, device="cpu")
    operation = operations().Linear(WIDTH, 96, dtype=BF16, device="cpu")
    operation.weight.data.copy_(module.weight)
    operation.bias.data.copy_(module.bias)
    results = [results_of(one, [one.weight, one.bias], recipe, 96) for one in (module, operation)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_grouped_mlp_is_an_mlp_for_each_expert(recipe: str) -> None:
    if recipe == "NVFP4BlockScaling" and Version(te.version()) < Version("2.18"):
        pytest.skip("TransformerEngine's grouped operation confuses NVFP4's quantizers before 2.18: docs/te-api.md")
    ops, splits = operations(), torch.tensor([128, 0, 128])
    options = {"device": "cpu", "dtype": BF16}
    first, second = ops.GroupedLinear(3, WIDTH, 256, **options), ops.GroupedLinear(3, 128, WIDTH, **options)
    names = [[name for name, _ in module.named_parameters()] for module in (first, second)]
    scales = torch.rand(256, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def formula(x: Tensor, *rest: Tensor) -> Tensor:
        hidden = DEFINITIONS["swiglu"](experts(names[0], rest, x, splits)) * rest[-3][:, None]
        return experts(names[1], rest[len(names[0]) :], hidden, splits)

    compare(
        [first, ops.ScaledSwiGLU(), second],
        formula,
        BF16,
        *(splits, scales, splits),
        rows=256,
        tolerance=tolerance_of(recipe),
        recipe=make_recipe(recipe),
    )


def test_a_quantize_operation_changes_nothing_but_where_the_cast_happens(recipe: str) -> None:
    ops, results = operations(), []
    for before in ([], [ops.Quantize()]):
        torch.manual_seed(0)
        layer = ops.Linear(WIDTH, WIDTH, device="cpu", dtype=BF16)
        results.append(results_of(ops.Sequential(*before, layer), [layer.weight], recipe, WIDTH))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_dropout_drops_the_same_entries_of_output_and_gradient(recipe: str) -> None:
    ops = operations()
    layer = ops.Linear(WIDTH, WIDTH, bias=False, device="cpu", dtype=BF16)
    model = ops.Sequential(layer, ops.Dropout(0.5), ops.AddExtraInput())
    x, extra = (torch.randn(ROWS, WIDTH).to(BF16).requires_grad_() for _ in range(2))
    with TE.autocast(enabled=True, recipe=make_recipe(recipe)):
        y = model(x, extra)
        y.backward(torch.ones_like(y))
    kept = y.detach() != extra.detach()
    assert 0.4 < kept.float().mean() < 0.6
    assert torch.equal(extra.grad, torch.ones_like(extra))
    # The gradient of the product is 2 where an entry was kept and 0 elsewhere; every format holds 0 and 2 exactly.
    of_weight = (2.0 * kept.float()).t() @ x.detach().float()
    assert (layer.weight.grad.float() - of_weight).norm() < tolerance_of(recipe) * of_weight.norm()
