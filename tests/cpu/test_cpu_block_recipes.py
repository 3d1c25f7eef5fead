"""TE's modules under the block-scaled recipes, forward and backward, through TE's public API only."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import nvfp4_reference
import pytest
import torch
from emulated_gpu import emulated
from packaging.version import Version
from torch import Tensor

from parity import te
from te_on_cpu import cuda
from te_on_cpu.enums import DType

TE = te.kernels("cpu").te
pytestmark = pytest.mark.usefixtures("blackwell")
BF16 = torch.bfloat16
TOKENS, IN, OUT = 64, 128, 256
RECIPES = ("Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
# The relative norm of the error against the plain BF16 module. E4M3 keeps 3 bits after the leading one, E2M1 keeps 1.
ERROR = {"Float8BlockScaling": (0.02, 0.1), "MXFP8BlockScaling": (0.02, 0.1), "NVFP4BlockScaling": (0.1, 0.45)}


def recipe_of(name: str, **options: Any) -> Any:
    from transformer_engine.common import recipe

    return getattr(recipe, name)(**options)


def step(module: Any, recipe: Any, x: Tensor, grad: Tensor, *arguments: Any) -> dict[str, Tensor]:
    """Return the output and gradients of one forward and backward pass."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    with TE.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, *arguments)
    y.backward(grad)
    return {"y": y.detach(), "dx": x.grad} | {
        name: parameter.grad.clone() for name, parameter in module.named_parameters()
    }


def inputs(features: int = IN, out: int = OUT) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(TOKENS, features, dtype=BF16), torch.randn(TOKENS, out, dtype=BF16)


def make(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return getattr(TE, kind)(IN, OUT, params_dtype=BF16, device="cpu", **options)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def quantizers(name: str) -> tuple[Any, Any]:
    """Return the recipe's quantizers: one for activations and gradients, and one for weights."""
    if name == "MXFP8BlockScaling":
        return TE.MXFP8Quantizer(DType.kFloat8E4M3), TE.MXFP8Quantizer(DType.kFloat8E4M3)
    options = {"rowwise": True, "columnwise": True}
    blocks = TE.Float8BlockQuantizer
    return tuple(blocks(DType.kFloat8E4M3, block_scaling_dim=dimensions, **options) for dimensions in (1, 2))


def decoded(quantizer: Any, values: Tensor, columnwise: bool) -> Tensor:
    tensor = quantizer(values.detach())
    tensor.update_usage(rowwise_usage=not columnwise, columnwise_usage=columnwise)
    return tensor.dequantize(dtype=torch.float32).double()


@pytest.mark.parametrize("name", ["Float8BlockScaling", "MXFP8BlockScaling"])
def test_linear_multiplies_decoded_rows_forward_and_decoded_columns_backward(name: str) -> None:
    module = make("Linear", bias=True)
    with torch.no_grad():
        module.bias.normal_()
    x, dy = inputs()
    result = step(module, recipe_of(name), x, dy)
    activations, weights = quantizers(name)
    w = module.weight
    expected = {
        "y": decoded(activations, x, False) @ decoded(weights, w, False).t() + module.bias.double(),
        "dx": decoded(activations, dy, False) @ decoded(weights, w, True),
        "weight": decoded(activations, dy, True).t() @ decoded(activations, x, True),
        "bias": dy.double().sum(0),
    }
    for what, exact in expected.items():
        error = (result[what].double() - exact.detach()).abs()
        assert (error <= 2.0**-8 * exact.abs() + 1e-4).all(), what


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_nvfp4_modules_equal_te_s_reference_recipe(kind: str) -> None:
    reference = nvfp4_reference.module()
    factory = next(getattr(reference, name) for name in vars(reference) if name.startswith("nvfp4_ref_rht_2d"))
    x, dy = inputs()
    nearest = recipe_of("NVFP4BlockScaling", disable_stochastic_rounding=True)  # the only rounding of the reference
    ours = step(make(kind, bias=False), nearest, x, dy)
    theirs = step(make(kind, bias=False), recipe_of("CustomRecipe", qfactory=factory), x, dy)
    for what, tensor in ours.items():
        # The reference adds FP32 sums block by block, so that a few of them round to the other BF16 neighbour.
        assert (tensor == theirs[what]).float().mean() > 0.99, what
        torch.testing.assert_close(tensor, theirs[what], rtol=2.0**-7, atol=1e-3, msg=what)


def operations() -> Any:
    import transformer_engine.pytorch.ops as ops

    linear = {"device": "cpu", "dtype": BF16}
    return ops.Sequential(ops.Linear(IN, OUT, **linear), ops.GELU(), ops.Linear(OUT, IN, **linear))


ON_CPU: dict[str, Any] = {"device": "cpu", "params_dtype": BF16}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout": 0, "attention_dropout": 0}
LAYERS: dict[str, Callable[[], Any]] = {
    "norm linear": lambda: make("LayerNormLinear"),
    "rms norm linear": lambda: make("LayerNormLinear", normalization="RMSNorm", bias=False),
    "mlp": lambda: make("LayerNormMLP"),
    "swiglu mlp": lambda: make("LayerNormMLP", normalization="RMSNorm", activation="swiglu", bias=False),
    "srelu mlp": lambda: make("LayerNormMLP", activation="srelu"),
    "grouped linear": lambda: TE.GroupedLinear(2, IN, OUT, **ON_CPU),
    "transformer layer": lambda: TE.TransformerLayer(IN, OUT, 4, bias=False, **NO_DROPOUT, **ON_CPU),
    "operations": operations,
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_differ_from_bf16_by_the_rounding_of_the_format(name: str, kind: str) -> None:
    if (kind, name) == ("operations", "Float8BlockScaling") and Version(te.version()) < Version("2.18"):
        pytest.skip("TransformerEngine's operations have this recipe from 2.18 on")
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    x, dy = inputs(out=OUT if kind.endswith("linear") else IN)
    if kind == "transformer layer":
        x, dy = x[:, None], dy[:, None]
    arguments = [[TOKENS // 2, TOKENS // 2]] if kind == "grouped linear" else []
    plain = step(layer, None, x, dy, *arguments)
    quantized = step(layer, recipe_of(name), x, dy, *arguments)
    least, most = ERROR[name]
    for what, tensor in plain.items():
        error = relative_error(quantized[what], tensor)
        assert error < most, what
        # A residual path, and a bias's gradient, are not quantized.
        assert error > least or kind == "transformer layer" or "bias" in what, what
    assert not torch.equal(quantized["y"], plain["y"])


@pytest.mark.parametrize("name", ["Float8BlockScaling", "MXFP8BlockScaling"])
def test_a_custom_recipe_of_the_same_quantizers_is_the_same(name: str) -> None:
    activations, weights = quantizers(name)

    def factory(role: Any) -> Any:
        tensor = role if isinstance(role, str) else getattr(role, "tensor_type", "")
        return (weights if "weight" in tensor else activations).copy()

    x, dy = inputs()
    custom = step(make("Linear"), recipe_of("CustomRecipe", qfactory=factory), x, dy)
    plain = step(make("Linear"), recipe_of(name), x, dy)
    assert all(torch.equal(tensor, plain[what]) for what, tensor in custom.items())


def test_block_scaling_runs_on_a_hopper_too() -> None:
    with emulated(cuda.HOPPER):
        module = make("Linear")
        on_hopper = step(module, recipe_of("Float8BlockScaling"), *inputs())
    with emulated(cuda.BLACKWELL):
        blackwell = step(module, recipe_of("Float8BlockScaling"), *inputs())
    assert all(torch.equal(tensor, blackwell[what]) for what, tensor in on_hopper.items())


def test_scales_need_not_be_powers_of_two() -> None:
    from transformer_engine.common.recipe import Float8BlockScaling, QParams

    class FP32Scales(Float8BlockScaling):
        fp8_quant_fwd_inp = QParams(power_2_scale=False, amax_epsilon=1e-6)
        fp8_quant_fwd_weight = QParams(power_2_scale=False, amax_epsilon=1e-6)
        fp8_quant_bwd_grad = QParams(power_2_scale=False, amax_epsilon=1e-6)

    with emulated(cuda.HOPPER):
        recipes = (None, FP32Scales(), recipe_of("Float8BlockScaling"))
        plain, quantized, powers = (step(make("Linear"), recipe, *inputs()) for recipe in recipes)
    assert not torch.equal(quantized["y"], powers["y"])
    for what in ("y", "dx", "weight"):
        error = relative_error(quantized[what], plain[what])
        assert 0.02 < error < 0.06, what


def test_nvfp4_gradients_are_seeded() -> None:
    module, (x, dy) = make("Linear"), inputs()
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(step(module, recipe_of("NVFP4BlockScaling"), x, dy))
    first, again, other = results
    assert torch.equal(first["weight"], again["weight"])
    assert torch.equal(first["y"], other["y"])
    assert not torch.equal(first["weight"], other["weight"])


TENSOR = {
    "Float8BlockScaling": "Float8BlockwiseQTensor",
    "MXFP8BlockScaling": "MXFP8Tensor",
    "NVFP4BlockScaling": "NVFP4Tensor",
}


def initialized(recipe: Any) -> Any:
    init = getattr(TE, "quantized_model_init", None) or TE.fp8_model_init
    with init(enabled=True, recipe=recipe):
        return make("Linear", bias=False)


@pytest.mark.parametrize("name", RECIPES)
def test_quantized_parameters_train_and_are_saved(name: str) -> None:
    recipe = recipe_of(name)
    module = initialized(recipe)
    assert type(module.weight).__name__ == TENSOR[name]
    torch.manual_seed(0)
    before = step(module, recipe, *inputs())
    with torch.no_grad():
        module.weight.copy_(module.weight.dequantize() - before["weight"])
    torch.manual_seed(0)
    after = step(module, recipe, *inputs())
    assert not torch.equal(before["y"], after["y"])

    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    restored = initialized(recipe)
    restored.load_state_dict(torch.load(file, weights_only=False))
    torch.manual_seed(0)
    assert torch.equal(step(restored, recipe, *inputs())["y"], after["y"])


VARIANTS = [
    ({"row_scaled_activation": True, "backward_override": "dequantized"}, "2.16"),
    ({"row_scaled_activation": True}, "2.19"),
    ({"nvfp4_4over6": "all"}, "2.18"),
]


@pytest.mark.parametrize(("options", "since"), VARIANTS, ids=str)
def test_variants_of_nvfp4_follow_bf16_as_closely(options: dict[str, Any], since: str) -> None:
    if Version(te.version()) < Version(since):
        pytest.skip(f"TransformerEngine runs this variant from {since} on")
    module, (x, dy) = make("Linear"), inputs()
    plain = step(module, None, x, dy)
    switched_off = {"disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True}
    quantized = step(module, recipe_of("NVFP4BlockScaling", **options, **switched_off), x, dy)
    for what in ("y", "dx", "weight"):
        error = relative_error(quantized[what], plain[what])
        assert 0.05 < error < 0.2, what
