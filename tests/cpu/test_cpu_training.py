"""Training with TE's modules: products and casts, recipes, FP8 parameters, checkpoints and recomputation."""

from __future__ import annotations

import functools
import importlib
import io
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from fp64_oracle import pairs_with_formula
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from parity import te
from te_on_cpu import versions
from te_on_cpu.enums import DType
from te_on_cpu.recipe import fused_amax_and_scale_update_after_reduction

TE = te.kernels("cpu").te
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
UNIT_ROUNDOFF = {FP32: 2.0**-24, BF16: 2.0**-8, FP16: 2.0**-11}
IN, OUT, TOKENS = 64, 32, 48
RECIPES = ["DelayedScaling", "Float8CurrentScaling"]
MODULES = ["Linear", "LayerNormLinear", "LayerNormMLP"]


def make_recipe(name: str | None, **options: Any) -> Any:
    from transformer_engine.common import recipe

    return None if name is None else getattr(recipe, name)(**options)


def make(name: str = "Linear", dtype: torch.dtype = BF16, **options: Any) -> Any:
    torch.manual_seed(0)
    return getattr(TE, name)(IN, OUT, params_dtype=dtype, device="cpu", **options)


def step(module: Any, fp8_recipe: Any = None, gain: float = 1.0, seed: int = 1) -> tuple[Tensor, ...]:
    """Run both passes, and return the input, the output, the output gradient and the input gradient."""
    rng = torch.Generator().manual_seed(seed)
    x = (gain * torch.randn(TOKENS, IN, generator=rng)).to(next(module.parameters()).dtype).requires_grad_()
    with TE.autocast(enabled=fp8_recipe is not None, recipe=fp8_recipe):
        y = module(x)
    grad = torch.randn(y.shape, generator=rng).to(y.dtype)
    module.zero_grad()
    y.backward(grad)
    return x.detach(), y.detach(), grad, x.grad


def fp8(values: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Return the FP64 values of a tensor's FP8 codes; the scale is by default that of its own amax."""
    limit = torch.finfo(dtype).max
    scale = torch.tensor(limit) / values.abs().max().float() if scale is None else scale
    return (values.float() * scale).clamp(-limit, limit).to(dtype).double() / scale.double()


def assert_product(result: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, tf32: bool = False) -> None:
    """Assert ``result = left @ right`` up to its own rounding, FP32 sums and, with ``tf32``, rounding of factors."""
    exact, sizes = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    factors = 2.01 * 2.0**-11 if tf32 else 0.0
    bound = (factors + 2.0**-18) * sizes + 1.01 * UNIT_ROUNDOFF[dtype] * exact.abs() + 1e-6
    assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_stays_within_the_roundings_of_its_precision(dtype: torch.dtype, bias: bool) -> None:
    module = make(dtype=dtype, bias=bias)
    x, y, grad, x_grad = step(module)
    tf32 = dtype == FP32
    ones = torch.ones(TOKENS, 1)
    inputs, weights = (x, module.weight.t())
    if bias:
        inputs, weights = torch.cat([x, ones], 1), torch.cat([module.weight.t(), module.bias[None]])
    assert_product(y, inputs, weights, dtype, tf32)
    assert_product(x_grad, grad, module.weight, dtype, tf32)
    assert_product(module.weight.grad, grad.t(), x, dtype, tf32)
    if bias:
        assert_product(module.bias.grad[None], ones.t(), grad, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_current_scaling_multiplies_the_codes_of_this_step(dtype: torch.dtype) -> None:
    module = make(dtype=dtype, bias=False)
    for gain in (1.0, 300.0, 0.01):
        x, y, grad, x_grad = step(module, make_recipe("Float8CurrentScaling"), gain)
        assert_product(y, fp8(x, E4M3), fp8(module.weight, E4M3).t(), dtype)
        assert_product(x_grad, fp8(grad, E5M2), fp8(module.weight, E4M3), dtype)
        assert_product(module.weight.grad, fp8(grad, E5M2).t(), fp8(x, E4M3), dtype)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_delayed_scaling_casts_with_scales_of_earlier_steps(dtype: torch.dtype, algorithm: str) -> None:
    module = make(dtype=dtype, bias=False)
    delayed = make_recipe("DelayedScaling", amax_history_len=3, amax_compute_algo=algorithm)
    x_amaxes: list[Tensor] = []
    grad_amaxes: list[Tensor] = []

    def scale(limit: float, amaxes: list[Tensor]) -> Tensor:
        if not amaxes:
            return torch.tensor(1.0)
        return torch.tensor(limit) / (amaxes[-1] if algorithm == "most_recent" else max(amaxes[-3:]))

    for gain in (1.0, 8.0, 2.0, 0.5, 0.25, 4.0):
        x, y, grad, x_grad = step(module, delayed, gain)
        x_scale, grad_scale = scale(448.0, x_amaxes), scale(57344.0, grad_amaxes)
        w_scale = scale(448.0, [module.weight.abs().max().float()] if x_amaxes else [])
        x_codes, grad_codes = fp8(x, E4M3, x_scale), fp8(grad, E5M2, grad_scale)
        assert_product(y, x_codes, fp8(module.weight, E4M3, w_scale).t(), dtype)
        assert_product(x_grad, grad_codes, fp8(module.weight, E4M3, w_scale), dtype)
        assert_product(module.weight.grad, grad_codes.t(), x_codes, dtype)
        x_amaxes.append(x.detach().abs().max().float())
        grad_amaxes.append(grad.abs().max().float())


@pytest.mark.parametrize("name", RECIPES)
def test_the_bias_gradient_of_an_fp8_linear_is_not_quantized(name: str) -> None:
    module = make()
    _, _, grad, _ = step(module, make_recipe(name))
    assert_product(module.bias.grad[None], torch.ones(1, TOKENS), grad, BF16)


@pytest.mark.parametrize("name", RECIPES)
def test_fp8_parameters_are_trained(name: str) -> None:
    with TE.quantized_model_init(enabled=True, recipe=make_recipe(name)):
        module = make(bias=False)
    assert isinstance(module.weight, TE.Float8Tensor)
    before = module.weight.dequantize().detach()
    amax_at_start = module.weight._quantizer.amax.clone() if name == "DelayedScaling" else None
    step(module, make_recipe(name))
    torch.optim.SGD(module.parameters(), lr=0.01).step()
    moved = torch.add(before, module.weight.grad, alpha=-0.01)
    amax = moved.abs().max().float() if amax_at_start is None else amax_at_start
    expected = fp8(moved, E4M3, torch.tensor(448.0) / amax)
    assert not torch.equal(moved, before)
    torch.testing.assert_close(module.weight.dequantize(dtype=FP32).double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", [*RECIPES, "Float8BlockScaling"])
def test_a_module_that_has_inferred_is_trained(name: str) -> None:
    """Expect that training can write to the histories and scales that inference mode made, as on a GPU."""
    x = torch.randn(TOKENS, IN).to(BF16)

    def trained(inferring: Callable[[], Any]) -> tuple[Tensor, ...]:
        module, recipe = make(), make_recipe(name)
        for mode in (inferring, torch.enable_grad):
            with mode(), TE.autocast(enabled=True, recipe=recipe):
                y = module(x)
        y.sum().backward()
        return y, module.weight.grad

    for result, expected in zip(trained(torch.inference_mode), trained(torch.no_grad), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("bias_gelu_fusion", ["0", "1"])
def test_gelu_in_the_epilogue_of_the_first_gemm_is_the_tanh_form(
    monkeypatch: pytest.MonkeyPatch, bias_gelu_fusion: str
) -> None:
    monkeypatch.setenv("NVTE_BIAS_GELU_NVFUSION", bias_gelu_fusion)
    module = TE.LayerNormMLP(IN, 2 * IN, params_dtype=FP32, device="cpu")

    def formula(x: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        hidden = layer_norm(x, (IN,), p["layer_norm_weight"], p["layer_norm_bias"])
        hidden = gelu(linear(hidden, p["fc1_weight"], p["fc1_bias"]), approximate="tanh")
        return linear(hidden, p["fc2_weight"], p["fc2_bias"])

    pairs = pairs_with_formula(module, formula, TOKENS, IN, dtype=FP32)
    # Each of the two consecutive GEMMs is off by about 2**-11 of the size of its result.
    torch.testing.assert_close(
        pairs[0][0].double(), pairs[0][1], rtol=0.0, atol=2.0**-9 * float(pairs[0][1].abs().max())
    )
    for actual, exact in pairs[1:]:
        assert (actual.double() - exact).norm() <= 2.0**-9 * exact.norm()


def update(
    buffer: Tensor, histories: list[Tensor], scales: list[Tensor], algorithm: str = "max", **options: Any
) -> None:
    kept = {"fp8_dtype": DType.kFloat8E4M3, "margin": 0.0} | options
    fused_amax_and_scale_update_after_reduction(buffer, histories, scales, algorithm, **kept)


def test_what_delayed_scaling_keeps_may_be_held_in_te_s_own_structure() -> None:
    meta = importlib.import_module("transformer_engine_torch").FP8TensorMeta()
    assert meta.scale is meta.scale_inv is meta.amax_history is None
    meta.scale, meta.amax_history = torch.ones(1), torch.tensor([[3.5]])
    update(meta.amax_history.clone().view(-1), [meta.amax_history], [meta.scale])
    assert meta.scale.item() == 448.0 / 3.5


ALL, LATEST = {"algorithm": "max"}, {"algorithm": "most_recent"}
# By what they show: the reduced amaxes, the history and the scales before, options, and the history and scales after.
UPDATES: dict[str, tuple[Any, ...]] = {
    "the history rolls up and its first row is cleared":
        ([5.0], [[5.0], [1.0], [8.0], [3.0]], [1.0], ALL, [[0.0], [8.0], [3.0], [5.0]], [448.0 / 8]),
    "the scale takes the largest amax to the largest code":
        ([5.0], [[5.0], [8.0]], [1.0], {"fp8_dtype": DType.kFloat8E5M2}, [[0.0], [5.0]], [57344.0 / 8]),
    "the oldest amax counts a last time and is dropped":
        ([4.0], [[4.0], [64.0], [2.0]], [1.0], ALL, [[0.0], [2.0], [4.0]], [7.0]),
    "most recent looks at this iteration alone":
        ([4.0], [[4.0], [1.0], [8.0]], [1.0], LATEST, [[0.0], [8.0], [4.0]], [112.0]),
    "the margin halves the scale once for each unit":
        ([4.0], [[4.0], [0.0]], [1.0], {"margin": 3}, [[0.0], [4.0]], [448.0 / 8 / 4]),
    "the reduced amax replaces the local one": ([16.0], [[4.0], [1.0]], [1.0], ALL, [[0.0], [16.0]], [28.0]),
    "a reduced amax of zero falls back on the local one":
        ([0.0], [[4.0], [1.0]], [1.0], ALL, [[0.0], [4.0]], [112.0]),
    **{
        f"{algorithm['algorithm']}: a tensor that took no part keeps its history and scale":
        ([0.0, 2.0], [[0.0, 2.0], [7.0, 1.0], [3.0, 1.0]], [5.0, 5.0], algorithm,
         [[0.0, 0.0], [7.0, 1.0], [3.0, 2.0]], [5.0, 224.0])
        for algorithm in (ALL, LATEST)
    },
    **{
        f"{algorithm['algorithm']}: an infinite amax keeps the scale":
        ([math.inf], [[0.0], [1.0]], [5.0], algorithm, [[0.0], [math.inf]], [5.0])
        for algorithm in (ALL, LATEST)
    },
    "an amax too small for a quotient gets the largest scale":
        ([2.0**-126], [[0.0], [0.0]], [1.0], ALL, [[0.0], [2.0**-126]], [torch.finfo(FP32).max]),
    "a history of one row keeps nothing": ([4.0], [[4.0]], [1.0], ALL, [[0.0]], [112.0]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("amax", "history", "scale", "options", "next_history", "next_scale"), UPDATES.values(), ids=UPDATES
)
def test_delayed_scaling_keeps_a_history_of_amaxes_and_derives_the_scale_from_it(
    amax: list[float], history: Any, scale: Any, options: dict[str, Any], next_history: Any, next_scale: list[float]
) -> None:
    history, scale = torch.tensor(history), torch.tensor(scale)
    update(torch.tensor(amax), [history], [scale], **options)
    assert (history.tolist(), scale.tolist()) == (next_history, next_scale)


def test_each_group_reads_its_own_part_of_the_buffer() -> None:
    histories = [torch.zeros(2, 3), torch.zeros(2, 2)]
    scales = [torch.ones(3), torch.ones(2)]
    buffer = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    update(buffer, histories, scales)
    assert scales[0].tolist() == [448.0, 224.0, 112.0]
    assert scales[1].tolist() == [56.0, 28.0]


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="'mean'"):
        update(torch.ones(1), [torch.ones(1, 1)], [torch.ones(1)], "mean")


@pytest.fixture(autouse=True)
def trusted_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow TE to load the pickled state of delayed scaling, which it refuses by default from 2.20 on."""
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")


EACH_MODULE = pytest.mark.parametrize("name", MODULES)
EACH_RECIPE = pytest.mark.parametrize("recipe_name", [None, *RECIPES])


def weights(module: Any) -> dict[str, torch.nn.Parameter]:
    """Return the parameters whose gradients a GEMM computes."""
    return {name: p for name, p in module.named_parameters() if p.dim() == 2}


@EACH_RECIPE
@EACH_MODULE
def test_weight_gradients_are_added_to_main_grad(name: str, recipe_name: str | None) -> None:
    plain, fused = make(name), make(name, fuse_wgrad_accumulation=True)
    for parameter in weights(fused).values():
        parameter.main_grad = torch.full(parameter.shape, 3.0)  # type: ignore[attr-defined]
    step(plain, make_recipe(recipe_name))
    step(fused, make_recipe(recipe_name))
    for key, parameter in weights(fused).items():
        expected = weights(plain)[key].grad
        added = parameter.main_grad - 3.0  # type: ignore[attr-defined]
        # The plain gradient is rounded to BF16; main_grad holds FP32 sums.
        torch.testing.assert_close(added, expected.float(), rtol=2.0**-7, atol=1e-4)
        assert not torch.equal(added, expected.float())


@EACH_RECIPE
@EACH_MODULE
def test_weight_gradients_can_be_computed_later(name: str, recipe_name: str | None) -> None:
    plain, delayed = make(name), make(name, delay_wgrad_compute=True)
    step(plain, make_recipe(recipe_name))
    step(delayed, make_recipe(recipe_name))
    assert all(parameter.grad is None for parameter in weights(delayed).values())
    delayed.backward_dw()
    for key, parameter in plain.named_parameters():
        assert torch.equal(delayed.get_parameter(key).grad, parameter.grad)


@pytest.mark.parametrize("recipe_name", RECIPES)
@EACH_MODULE
def test_fp8_parameters_compute_what_casts_of_them_compute(name: str, recipe_name: str) -> None:
    with TE.quantized_model_init(recipe=make_recipe(recipe_name)):
        quantized = make(name)
    plain = make(name)
    for key, parameter in quantized.named_parameters():
        value = parameter.dequantize() if hasattr(parameter, "_quantizer") else parameter
        plain.get_parameter(key).data.copy_(value)
    assert {type(p).__name__ for p in weights(quantized).values()} == {"Float8Tensor"}
    y, expected = (step(module, make_recipe(recipe_name))[1] for module in (quantized, plain))
    # A weight decoded from codes is cast to the same codes again if it gets the same scale.
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
    for key, parameter in weights(quantized).items():
        assert parameter.grad.dtype == BF16
        error = (parameter.grad.float() - plain.get_parameter(key).grad.float()).norm()
        assert error <= 0.1 * plain.get_parameter(key).grad.float().norm()


@EACH_RECIPE
@pytest.mark.parametrize("name", [*MODULES, "GroupedLinear"])
def test_training_resumes_from_a_checkpoint_to_the_bit(name: str, recipe_name: str | None) -> None:
    def build() -> tuple[Any, Any, Any]:
        if name == "GroupedLinear":
            torch.manual_seed(0)
            module = TE.GroupedLinear(1, IN, OUT, params_dtype=BF16, device="cpu")
            forward = module.forward
            module.forward = lambda x: forward(x, [TOKENS])
        else:
            module = make(name)
        return module, torch.optim.SGD(module.parameters(), lr=0.02), make_recipe(recipe_name)

    def train(module: Any, optimizer: Any, recipe: Any, seeds: range) -> list[Tensor]:
        outputs = []
        for seed in seeds:
            optimizer.zero_grad()
            outputs.append(step(module, recipe, seed=seed)[1])
            optimizer.step()
        return outputs

    module, optimizer, recipe = build()
    train(module, optimizer, recipe, range(4))
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    straight = train(module, optimizer, recipe, range(4, 8))
    resumed, optimizer, recipe = build()
    buffer.seek(0)
    resumed.load_state_dict(torch.load(buffer, weights_only=False))
    assert all(torch.equal(a, b) for a, b in zip(straight, train(resumed, optimizer, recipe, range(4, 8)), strict=True))


def make_layer(**options: Any) -> Any:
    torch.manual_seed(0)
    return TE.TransformerLayer(32, 64, 4, params_dtype=BF16, device="cpu", **options)


def layer_results(layer: Any, call: Callable[..., Tensor], **options: Any) -> list[Tensor | None]:
    """Return the output and all gradients of one training step, with the same seed each time."""
    x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1)).to(BF16).requires_grad_()
    torch.manual_seed(7)
    output = call(x, **options)
    output.float().pow(2).sum().backward()
    return [output, x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_a_layer_changes_no_bit(dropout: float, use_reentrant: bool) -> None:
    layers = [make_layer(hidden_dropout=dropout, attention_dropout=dropout) for _ in range(2)]
    # TE remembers from the last checkpoint whether it was reentrant, and fuses bias and GELU only then.
    checkpoint = functools.partial(TE.checkpoint, layers[0], use_reentrant=use_reentrant)
    checkpointed, plain = layer_results(layers[0], checkpoint), layer_results(layers[1], layers[1])
    assert all(torch.equal(*pair) for pair in zip(checkpointed, plain, strict=True))


@pytest.mark.skipif(
    versions.installed_version().release[:2] == (2, 19),
    reason="TE 2.19 hands fused attention its inputs twice, and then runs the projection's backward twice",
)
def test_checkpointing_the_core_attention_changes_no_bit() -> None:
    results = []
    # TE remembers from the last checkpoint whether it was reentrant, and fuses bias and GELU only then.
    for checkpointed in (True, False):
        layer = make_layer(hidden_dropout=0.0, attention_dropout=0.1)
        results.append(layer_results(layer, layer, checkpoint_core_attention=checkpointed))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_forked_random_state_is_apart_from_the_default_one() -> None:
    from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("model-parallel-rng", 5)
    before = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with tracker.fork("model-parallel-rng"):
            draws.append(torch.rand(4))
    assert torch.equal(torch.get_rng_state(), before)
    expected = torch.rand(8, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.cat(draws), expected)


def test_a_layer_draws_its_dropout_from_the_tracker() -> None:
    from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    states = tracker.get_states()
    layer = make_layer(hidden_dropout=0.0, attention_dropout=0.3, get_rng_state_tracker=lambda: tracker)
    x = torch.randn(16, 2, 32).to(BF16)
    outputs = []
    for seed in (1, 2):
        tracker.set_states(dict(states))
        torch.manual_seed(seed)
        outputs.append(layer(x))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], layer(x))
