"""TE's fusible operations (``te.ops``) under every recipe: fused as TE fuses them, and as a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from emulated_gpu import emulated
from fusible import BF16, ROWS, WIDTH, compare, fused_sequences, gated, make_recipe, operations
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import linear, silu

from parity import te
from parity.cpu import cuda
from parity.numerics import formats

# By recipe: the GPU that has it, and what it rounds operands with, as the expected error of a comparison models it.
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
    """The name of a recipe, on a GPU that has it."""
    with emulated(getattr(cuda, RECIPES[request.param][0])):
        yield request.param


def tolerance_of(recipe: str) -> float:
    """What two products in a row may lose, each of two operands.

    Roundings are independent. A weight's gradient gathers most of them: its own two operands, and what two products
    left in each of these, six in all, of the relative size that a rounding of normal numbers has.
    """
    torch.manual_seed(0)
    values = torch.randn(128, 128)
    worst = max(((rounded(values, 1) - values).norm() / values.norm()).item() for rounded in RECIPES[recipe][1])
    return 6**0.5 * worst + 2.0**-6


@pytest.mark.parametrize("name", fused_sequences(BF16))
def test_fused_sequences_err_by_the_rounding_of_the_recipe(name: str, recipe: str) -> None:
    ops, formula, extras = fused_sequences(BF16)[name]
    inputs = [torch.randn(ROWS, WIDTH).to(BF16).requires_grad_() for _ in range(extras)]
    compare(ops, formula, BF16, *inputs, tolerance=tolerance_of(recipe), recipe=make_recipe(recipe))


# By sequence: what TE makes one operation of, forward and backward.
FUSIONS = {
    "linear bias add": ("ForwardLinearBiasAdd", "BasicLinear"),
    "linear scale add": ("ForwardLinearScaleAdd", "BackwardLinearScale"),
    "extra output linear": ("MakeExtraOutput", "BackwardLinearAdd"),
    "extra output norm": ("MakeExtraOutput", "BackwardAddRMSNorm"),
    "linear activation linear": ("ForwardLinearBiasActivation", "BackwardActivationBias"),
    "norm mlp": ("LayerNorm", "SwiGLU"),
}


@pytest.mark.parametrize("name", FUSIONS)
def test_te_fuses_what_the_sequences_are_for(name: str) -> None:
    ops, _, extras = fused_sequences(BF16)[name]
    model = operations().Sequential(*ops)
    inputs = [torch.randn(ROWS, WIDTH).to(BF16).requires_grad_() for _ in range(1 + extras)]
    with te.kernels("cpu").te.autocast(enabled=True, recipe=make_recipe("DelayedScaling")):
        model(*inputs)
    fuser = model._module_groups[0]
    forward, backward = ({type(op).__name__ for op, _ in found} for found in (fuser._forward_ops, fuser._backward_ops))
    assert FUSIONS[name][0] in forward
    assert FUSIONS[name][1] in backward


def test_linear_operation_and_linear_module_are_the_same_to_the_bit(recipe: str) -> None:
    te_module = te.kernels("cpu").te
    module = te_module.Linear(WIDTH, 96, params_dtype=BF16, device="cpu")
    operation = operations().Linear(WIDTH, 96, dtype=BF16, device="cpu")
    operation.weight.data.copy_(module.weight)
    operation.bias.data.copy_(module.bias)
    x, grad, results = torch.randn(ROWS, WIDTH).to(BF16), torch.randn(ROWS, 96).to(BF16), []
    for candidate in (module, operation):
        torch.manual_seed(0)  # NVFP4 rounds gradients stochastically
        inp = x.clone().requires_grad_()
        with te_module.autocast(enabled=True, recipe=make_recipe(recipe)):
            y = candidate(inp)
        y.backward(grad)
        results.append((y, inp.grad, candidate.weight.grad, candidate.bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def experts(linears: dict[str, Tensor], x: Tensor, splits: Tensor) -> Tensor:
    parts = enumerate(x.split(splits.tolist()))
    return torch.cat([linear(part, linears[f"weight{i}"], linears[f"bias{i}"]) for i, part in parts])


def test_a_grouped_mlp_is_an_mlp_for_each_expert(recipe: str) -> None:
    if recipe == "NVFP4BlockScaling" and Version(te.version()) < Version("2.18"):
        pytest.skip("TransformerEngine's grouped operation confuses NVFP4's quantizers before 2.18: docs/te-api.md")
    ops, splits = operations(), torch.tensor([128, 0, 128])
    options = {"device": "cpu", "dtype": BF16}
    first, second = ops.GroupedLinear(3, WIDTH, 256, **options), ops.GroupedLinear(3, 128, WIDTH, **options)
    names = [[name for name, _ in module.named_parameters()] for module in (first, second)]
    scales = torch.rand(256, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def formula(x: Tensor, *rest: Tensor) -> Tensor:
        up = dict(zip(names[0], rest, strict=False))
        down = dict(zip(names[1], rest[len(names[0]) :], strict=False))
        hidden = gated(silu)(experts(up, x, splits)) * rest[-3][:, None]
        return experts(down, hidden, splits)

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
    te_module, ops = te.kernels("cpu").te, operations()
    x, grad, results = torch.randn(ROWS, WIDTH).to(BF16), torch.randn(ROWS, WIDTH).to(BF16), []
    for before in ([], [ops.Quantize()]):
        torch.manual_seed(0)
        layer = ops.Linear(WIDTH, WIDTH, device="cpu", dtype=BF16)
        inp = x.clone().requires_grad_()
        with te_module.autocast(enabled=True, recipe=make_recipe(recipe)):
            y = ops.Sequential(*before, layer)(inp)
        y.backward(grad)
        results.append((y, inp.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_dropout_drops_the_same_entries_of_output_and_gradient(recipe: str) -> None:
    te_module, ops = te.kernels("cpu").te, operations()
    layer = ops.Linear(WIDTH, WIDTH, bias=False, device="cpu", dtype=BF16)
    model = ops.Sequential(layer, ops.Dropout(0.5), ops.AddExtraInput())
    x, extra = (torch.randn(ROWS, WIDTH).to(BF16).requires_grad_() for _ in range(2))
    with te_module.autocast(enabled=True, recipe=make_recipe(recipe)):
        y = model(x, extra)
        y.backward(torch.ones_like(y))
    kept = y.detach() != extra.detach()
    assert 0.4 < kept.float().mean() < 0.6
    assert torch.equal(extra.grad, torch.ones_like(extra))
    # The gradient of the product is 2 where an entry was kept, and no format rounds 0 and 2.
    of_weight = (2.0 * kept.float()).t() @ x.detach().float()
    assert (layer.weight.grad.float() - of_weight).norm() < tolerance_of(recipe) * of_weight.norm()
