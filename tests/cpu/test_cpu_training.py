"""Training with TE's modules: products and casts, recipes, FP8 parameters, checkpoints and recomputation."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


def make_recipe(name: str | None, **options: Any) -> Any:
    from transformer_engine.common import recipe

    return None if name is None else getattr(recipe, name)(**options)


def make_linear(dtype: torch.dtype, bias: bool = True) -> Any:
    torch.manual_seed(0)
    return TE.Linear(IN, OUT, bias=bias, params_dtype=dtype, device="cpu")


def step(module: Any, fp8_recipe: Any = None, gain: float = 1.0) -> tuple[Tensor, ...]:
    """Run both passes, and return the input, the output, the output gradient and the input gradient."""
    x = (gain * torch.randn(TOKENS, IN)).to(next(module.parameters()).dtype).requires_grad_()
    with TE.autocast(enabled=fp8_recipe is not None, recipe=fp8_recipe):
        y = module(x)
    grad = torch.randn_like(y)
    module.zero_grad()
    y.backward(grad)
    assert x.grad is not None
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
    module = make_linear(dtype, bias)
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
    module = make_linear(dtype, bias=False)
    for gain in (1.0, 300.0, 0.01):
        x, y, grad, x_grad = step(module, make_recipe("Float8CurrentScaling"), gain)
        assert_product(y, fp8(x, E4M3), fp8(module.weight, E4M3).t(), dtype)
        assert_product(x_grad, fp8(grad, E5M2), fp8(module.weight, E4M3), dtype)
        assert_product(module.weight.grad, fp8(grad, E5M2).t(), fp8(x, E4M3), dtype)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_delayed_scaling_casts_with_scales_of_earlier_steps(dtype: torch.dtype, algorithm: str) -> None:
    module = make_linear(dtype, bias=False)
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


@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_bias_gradient_of_an_fp8_linear_is_not_quantized(dtype: torch.dtype, name: str) -> None:
    module = make_linear(dtype)
    _, _, grad, _ = step(module, make_recipe(name))
    assert_product(module.bias.grad[None], torch.ones(1, TOKENS), grad, dtype)


@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling"])
def test_fp8_parameters_are_trained(name: str) -> None:
    with TE.quantized_model_init(enabled=True, recipe=make_recipe(name)):
        module = make_linear(BF16, bias=False)
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


@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
def test_a_module_that_has_inferred_is_trained(name: str) -> None:
    """Expect that training can write to the histories and scales that inference mode made, as on a GPU."""
    x = torch.randn(TOKENS, IN).to(BF16)

    def trained(inferring: Callable[[], Any]) -> tuple[Tensor, ...]:
        module, recipe = make_linear(BF16), make_recipe(name)
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
    torch.manual_seed(0)
    module = TE.LayerNormMLP(IN, 2 * IN, params_dtype=FP32, device="cpu")
    x, y, grad, x_grad = step(module)
    p = {name: parameter.detach().double().requires_grad_() for name, parameter in module.named_parameters()}
    x64 = x.detach().double().requires_grad_()
    hidden = linear(
        layer_norm(x64, (IN,), p["layer_norm_weight"], p["layer_norm_bias"]), p["fc1_weight"], p["fc1_bias"]
    )
    expected = linear(gelu(hidden, approximate="tanh"), p["fc2_weight"], p["fc2_bias"])
    expected.backward(grad.double())
    # Each of the two consecutive GEMMs is off by about 2**-11 of the size of its result.
    torch.testing.assert_close(y.double(), expected.detach(), rtol=0.0, atol=2.0**-9 * expected.abs().max().item())
    for actual, exact in [(x_grad, x64.grad), *((v.grad, p[n].grad) for n, v in module.named_parameters())]:
        assert (actual.double() - exact).norm() <= 2.0**-9 * exact.norm()


amaxes = st.floats(0.0, 1e6, width=32)


def update(
    amax: list[float],
    history: list[list[float]],
    scale: list[float],
    algorithm: str = "max",
    dtype: DType = DType.kFloat8E4M3,
    margin: float = 0,
) -> tuple[list[list[float]], list[float]]:
    """Update one group of tensors once, and return the new history, rows first, and the new scales."""
    histories, scales = [torch.tensor(history)], [torch.tensor(scale)]
    fused_amax_and_scale_update_after_reduction(torch.tensor(amax), histories, scales, algorithm, dtype, margin)
    return histories[0].tolist(), scales[0].tolist()


def test_what_delayed_scaling_keeps_may_be_held_in_te_s_own_structure() -> None:
    meta = importlib.import_module("transformer_engine_torch").FP8TensorMeta()
    assert meta.scale is meta.scale_inv is meta.amax_history is None
    meta.scale, meta.amax_history = torch.ones(1), torch.tensor([[3.5]])
    buffer = meta.amax_history.clone().view(-1)
    fused_amax_and_scale_update_after_reduction(buffer, [meta.amax_history], [meta.scale], "max", DType.kFloat8E4M3, 0)
    assert meta.scale.item() == 448.0 / 3.5


def test_the_history_rolls_up_and_its_first_row_is_cleared() -> None:
    history, _ = update([5.0], [[5.0], [1.0], [2.0], [3.0]], [1.0])
    assert history == [[0.0], [2.0], [3.0], [5.0]]


def test_the_scale_takes_the_largest_amax_of_the_history_to_the_largest_code() -> None:
    assert update([5.0], [[5.0], [1.0], [8.0], [3.0]], [1.0])[1] == [448.0 / 8.0]
    assert update([5.0], [[5.0], [1.0], [8.0], [3.0]], [1.0], dtype=DType.kFloat8E5M2)[1] == [57344.0 / 8.0]


def test_the_oldest_amax_counts_a_last_time_and_is_dropped() -> None:
    history, scale = update([4.0], [[4.0], [64.0], [2.0]], [1.0])
    assert (history, scale) == ([[0.0], [2.0], [4.0]], [7.0])
    assert update([4.0], history, scale)[1] == [112.0]


def test_most_recent_looks_at_this_iteration_alone() -> None:
    assert update([4.0], [[4.0], [1.0], [8.0]], [1.0], "most_recent")[1] == [112.0]


def test_the_margin_halves_the_scale_once_for_each_unit() -> None:
    assert update([4.0], [[4.0], [0.0]], [1.0], margin=3)[1] == [448.0 / 8 / 4]


def test_the_reduced_amax_replaces_the_local_one() -> None:
    history, scale = update([16.0], [[4.0], [1.0]], [1.0])
    assert (history, scale) == ([[0.0], [16.0]], [28.0])


def test_a_reduced_amax_of_zero_falls_back_on_the_local_one() -> None:
    history, scale = update([0.0], [[4.0], [1.0]], [1.0])
    assert (history, scale) == ([[0.0], [4.0]], [112.0])


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_tensor_that_took_no_part_keeps_its_history_and_scale(algorithm: str) -> None:
    history, scale = update([0.0, 2.0], [[0.0, 2.0], [7.0, 1.0], [3.0, 1.0]], [5.0, 5.0], algorithm)
    assert history == [[0.0, 0.0], [7.0, 1.0], [3.0, 2.0]]
    assert scale == [5.0, 224.0]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_an_infinite_amax_keeps_the_scale(algorithm: str) -> None:
    history, scale = update([float("inf")], [[0.0], [1.0]], [5.0], algorithm)
    assert (history, scale) == ([[0.0], [float("inf")]], [5.0])


def test_an_amax_too_small_for_a_quotient_gets_the_largest_scale() -> None:
    assert update([1e-38], [[1e-38], [0.0]], [1.0])[1] == [torch.finfo(torch.float32).max]


def test_a_history_of_one_row_keeps_nothing() -> None:
    assert update([4.0], [[4.0]], [1.0]) == ([[0.0]], [112.0])


def test_each_group_reads_its_own_part_of_the_buffer() -> None:
    histories = [torch.zeros(2, 3), torch.zeros(2, 2)]
    scales = [torch.ones(3), torch.ones(2)]
    buffer = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    fused_amax_and_scale_update_after_reduction(buffer, histories, scales, "max", DType.kFloat8E4M3, 0)
    assert scales[0].tolist() == [448.0, 224.0, 112.0]
    assert scales[1].tolist() == [56.0, 28.0]


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="'mean'"):
        update([1.0], [[1.0]], [1.0], "mean")


@given(steps=st.lists(amaxes.filter(lambda amax: amax > 0), min_size=1, max_size=12), length=st.integers(1, 6))
def test_after_any_run_the_scale_follows_from_as_many_amaxes_as_the_history_has_rows(
    steps: list[float], length: int
) -> None:
    history, scale = torch.zeros(length, 1), torch.ones(1)
    for amax in steps:
        fused_amax_and_scale_update_after_reduction(
            torch.tensor([amax]), [history], [scale], "max", DType.kFloat8E4M3, 0
        )
    newest_first = steps[::-1] + [0.0] * length
    assert history.flatten().tolist()[1:] == newest_first[: length - 1][::-1]
    quotient = torch.tensor(448.0) / torch.tensor(max(newest_first[:length]))
    assert scale.item() == min(quotient.item(), torch.finfo(torch.float32).max)


ROWS, WIDTH, FFN = 32, 32, 64
RECIPES = ["DelayedScaling", "Float8CurrentScaling"]
MODULES = ["Linear", "LayerNormLinear", "LayerNormMLP"]


@pytest.fixture(autouse=True)
def trusted_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow TE to load the pickled state of delayed scaling, which it refuses by default from 2.20 on."""
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")


def make(name: str, dtype: torch.dtype = BF16, **options: Any) -> Any:
    torch.manual_seed(0)
    return getattr(TE, name)(WIDTH, FFN, params_dtype=dtype, device="cpu", **options)


def train_step(module: Any, recipe: Any = None, seed: int = 1) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    dtype = BF16 if next(module.parameters()).dtype == BF16 else FP32
    x = torch.randn(ROWS, WIDTH, generator=rng).to(dtype)
    with TE.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.backward(torch.randn(y.shape, generator=rng).to(y.dtype))
    return y.detach()


def weights(module: Any) -> dict[str, torch.nn.Parameter]:
    """Return the parameters whose gradients a GEMM computes."""
    return {name: p for name, p in module.named_parameters() if p.dim() == 2}


@pytest.mark.parametrize("recipe_name", [None, *RECIPES])
@pytest.mark.parametrize("name", MODULES)
def test_weight_gradients_are_added_to_main_grad(name: str, recipe_name: str | None) -> None:
    plain, fused = make(name), make(name, fuse_wgrad_accumulation=True)
    recipes = make_recipe(recipe_name), make_recipe(recipe_name)
    for parameter in weights(fused).values():
        parameter.main_grad = torch.full(parameter.shape, 3.0)  # type: ignore[attr-defined]
    train_step(plain, recipes[0])
    train_step(fused, recipes[1])
    for key, parameter in weights(fused).items():
        expected = weights(plain)[key].grad
        assert expected is not None
        added = parameter.main_grad - 3.0  # type: ignore[attr-defined]
        # The plain gradient is rounded to BF16; main_grad holds FP32 sums.
        torch.testing.assert_close(added, expected.float(), rtol=2.0**-7, atol=1e-4)
        assert not torch.equal(added, expected.float())


@pytest.mark.parametrize("recipe_name", [None, *RECIPES])
@pytest.mark.parametrize("name", MODULES)
def test_weight_gradients_can_be_computed_later(name: str, recipe_name: str | None) -> None:
    plain, delayed = make(name), make(name, delay_wgrad_compute=True)
    train_step(plain, make_recipe(recipe_name))
    train_step(delayed, make_recipe(recipe_name))
    assert all(parameter.grad is None for parameter in weights(delayed).values())
    delayed.backward_dw()
    for key, parameter in plain.named_parameters():
        assert torch.equal(delayed.get_parameter(key).grad, parameter.grad)


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_fp8_parameters_compute_what_casts_of_them_compute(name: str, recipe_name: str) -> None:
    with TE.quantized_model_init(recipe=make_recipe(recipe_name)):
        quantized = make(name)
    plain = make(name)
    for key, parameter in quantized.named_parameters():
        value = parameter.dequantize() if hasattr(parameter, "_quantizer") else parameter
        plain.get_parameter(key).data.copy_(value)
    assert {type(p).__name__ for p in weights(quantized).values()} == {"Float8Tensor"}
    y, expected = (
        train_step(quantized, make_recipe(recipe_name)),
        train_step(plain, make_recipe(recipe_name)),
    )
    # A weight decoded from codes is cast to the same codes again if it gets the same scale.
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
    for key, parameter in weights(quantized).items():
        assert parameter.grad is not None
        assert parameter.grad.dtype == BF16
        error = (parameter.grad.float() - plain.get_parameter(key).grad.float()).norm()
        assert error <= 0.1 * plain.get_parameter(key).grad.float().norm()


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_a_torch_optimizer_steps_on_fp8_parameters(recipe_name: str) -> None:
    with TE.quantized_model_init(recipe=make_recipe(recipe_name)):
        module = make("Linear", dtype=FP32, bias=False)
    before = module.weight.dequantize()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    train_step(module, make_recipe(recipe_name))
    grad = module.weight.grad.clone()
    optimizer.step()
    after = module.weight.dequantize()
    assert type(module.weight.data).__name__ == "Float8Tensor"
    assert (after - (before - 1e-4 * grad)).abs().max() <= 2.0**-4 * after.abs().max()
    assert not torch.equal(after, before)


@pytest.mark.parametrize("recipe_name", [None, *RECIPES])
@pytest.mark.parametrize("name", [*MODULES, "GroupedLinear"])
def test_training_resumes_from_a_checkpoint_to_the_bit(name: str, recipe_name: str | None) -> None:
    def build() -> tuple[Any, Any, Any]:
        if name == "GroupedLinear":
            torch.manual_seed(0)
            module = TE.GroupedLinear(1, WIDTH, FFN, params_dtype=BF16, device="cpu")
            forward = module.forward
            module.forward = lambda x: forward(x, [ROWS])
        else:
            module = make(name)
        return module, torch.optim.SGD(module.parameters(), lr=0.02), make_recipe(recipe_name)

    def train(module: Any, optimizer: Any, recipe: Any, seeds: range) -> list[Tensor]:
        outputs = []
        for seed in seeds:
            optimizer.zero_grad()
            outputs.append(train_step(module, recipe, seed))
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


def test_a_checkpoint_of_delayed_scaling_holds_its_amax_history() -> None:
    module, recipe = make("Linear"), make_recipe("DelayedScaling")
    for seed in range(3):
        train_step(module, recipe, seed)
    state, fresh = module.state_dict(), make("Linear")
    assert state["_extra_state"].numel() > 0
    fresh.load_state_dict(state)
    for direction in ("scaling_fwd", "scaling_bwd"):
        saved, loaded = module.fp8_meta[direction], fresh.fp8_meta[direction]
        assert torch.equal(saved.amax_history, loaded.amax_history)
        assert torch.equal(saved.scale, loaded.scale)
        assert saved.amax_history.any()


def make_layer(**options: Any) -> Any:
    torch.manual_seed(0)
    return TE.TransformerLayer(32, 64, 4, params_dtype=BF16, device="cpu", **options)


def layer_step(layer: Callable[..., Tensor], **options: Any) -> list[Tensor]:
    """Return the output and the input gradient of one training step, with the same seed each time."""
    x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1)).to(BF16).requires_grad_()
    torch.manual_seed(7)
    output = layer(x, **options)
    output.float().pow(2).sum().backward()
    assert x.grad is not None
    return [output, x.grad]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_a_layer_changes_no_bit(dropout: float, use_reentrant: bool) -> None:
    results = []
    # TE remembers from the last checkpoint whether it was reentrant, and fuses bias and GELU only then.
    for checkpointed in (True, False):
        layer = make_layer(hidden_dropout=dropout, attention_dropout=dropout)

        def call(x: Tensor, layer: Any = layer, checkpointed: bool = checkpointed) -> Tensor:
            return TE.checkpoint(layer, x, use_reentrant=use_reentrant) if checkpointed else layer(x)

        results.append([*layer_step(call), *(parameter.grad for parameter in layer.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.skipif(
    versions.installed_version().release[:2] == (2, 19),
    reason="TE 2.19 hands fused attention its inputs twice, and then runs the projection's backward twice",
)
def test_checkpointing_the_core_attention_changes_no_bit() -> None:
    results = []
    # TE remembers from the last checkpoint whether it was reentrant, and fuses bias and GELU only then.
    for checkpointed in (True, False):
        layer = make_layer(hidden_dropout=0.0, attention_dropout=0.1)
        outputs = layer_step(layer, checkpoint_core_attention=checkpointed)
        results.append([*outputs, *(parameter.grad for parameter in layer.parameters())])
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
