"""Formulas of TE's fusible operations, and a comparison of a sequence of them with its formula in FP64."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, relu, rms_norm, silu

from parity import te

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROWS, WIDTH = 32, 64
# TE's FP32 products round their operands to TF32.
TOLERANCE = {FP32: 2.0**-10, BF16: 2.0**-6, FP16: 2.0**-9}


def operations() -> ModuleType:
    te.kernels("cpu")
    import transformer_engine.pytorch.ops as ops

    return ops


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """TE gates with the first half of the features."""
    return lambda x: activation(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def tanh_gelu(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


def squared_relu(x: Tensor) -> Tensor:
    return relu(x).square()


def clamped_swiglu(x: Tensor, limit: float = 7.0) -> Tensor:
    gate, up = x.chunk(2, -1)
    return quick_gelu(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + 1)


def situglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh()


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
    """Run operations and a formula in FP64 on the same numbers; outputs, input and parameter gradients agree.

    Args:
        formula: takes the input, the parameters, and extra inputs: those that require a gradient first.
        tolerance: relative error, in the Euclidean norm, of each output and gradient. Default: that of the dtype.
    """
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=rng).to(dtype).requires_grad_()
    model = operations().Sequential(*ops)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=rng) / parameter.shape[-1] ** 0.5)
    leaves = [x, *model.parameters(), *(e for e in extra if e.requires_grad)]
    # Operations in place write into extra inputs and into gradients: the formula gets what they held before.
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
        assert actual is not None
        error = (actual.double() - expected).norm()
        assert error <= (TOLERANCE[dtype] if tolerance is None else tolerance) * expected.norm()


def make_recipe(name: str) -> Any:
    te.kernels("cpu")
    from transformer_engine.common import recipe

    return getattr(recipe, name)()


def fused_sequences(dtype: torch.dtype) -> dict[str, tuple[list[Any], Callable[..., Any], int]]:
    """Sequences that TE fuses in the forward pass, in the backward pass, or in both.

    Returns:
        By name: operations, formula, and how many extra inputs there are.
    """
    ops, options = operations(), {"device": "cpu", "dtype": dtype}

    def make_linear(bias: bool = True, inner: int = WIDTH) -> Any:
        return ops.Linear(inner, WIDTH, bias=bias, **options)

    return {
        "linear bias add": (
            [make_linear(), ops.AddExtraInput(in_place=True)],
            lambda x, w, b, e: linear(x, w, b) + e,
            1,
        ),
        "linear scale add": (
            [make_linear(False), ops.ConstantScale(0.5), ops.AddExtraInput(in_place=True)],
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
            lambda x, w: (rms_norm(x, (WIDTH,), w, 1e-5), x),
            0,
        ),
        "linear activation linear": (
            [make_linear(), ops.GELU(), make_linear()],
            lambda x, w, b, v, c: linear(tanh_gelu(linear(x, w, b)), v, c),
            0,
        ),
        "norm mlp": (
            [
                ops.LayerNorm(WIDTH, **options),
                make_linear(False),
                ops.SwiGLU(),
                ops.Linear(WIDTH // 2, WIDTH, **options),
            ],
            lambda x, g, h, w, v, c: linear(gated(silu)(linear(layer_norm(x, (WIDTH,), g, h, 1e-5), w)), v, c),
            0,
        ),
    }
