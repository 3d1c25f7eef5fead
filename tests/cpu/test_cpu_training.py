"""What a training loop does with TE's modules besides a step, on the CPU kernels.

Weight gradients that wait or are added to ``main_grad``, FP8 parameters, checkpoints with FP8 state.
"""

from __future__ import annotations

import io
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import te

FP32, BF16 = torch.float32, torch.bfloat16
ROWS, WIDTH, FFN = 32, 32, 64
RECIPES = ["DelayedScaling", "Float8CurrentScaling"]
MODULES = ["Linear", "LayerNormLinear", "LayerNormMLP"]


@pytest.fixture(scope="module")
def te_module() -> ModuleType:
    return te.kernels("cpu").te


@pytest.fixture(autouse=True)
def trusted_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2.20, TE loads the pickled state of delayed scaling only if told that it may."""
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")


def make_recipe(name: str | None) -> Any:
    from transformer_engine.common import recipe

    return None if name is None else getattr(recipe, name)()


def make(te_module: ModuleType, name: str, dtype: torch.dtype = BF16, **options: Any) -> Any:
    torch.manual_seed(0)
    return getattr(te_module, name)(WIDTH, FFN, params_dtype=dtype, device="cpu", **options)


def step(te_module: ModuleType, module: Any, recipe: Any = None, seed: int = 1) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    dtype = BF16 if next(module.parameters()).dtype == BF16 else FP32
    x = torch.randn(ROWS, WIDTH, generator=rng).to(dtype)
    with te_module.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.backward(torch.randn(y.shape, generator=rng).to(y.dtype))
    return y.detach()


def weights(module: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that a GEMM computes the gradients of."""
    return {name: p for name, p in module.named_parameters() if p.dim() == 2}


@pytest.mark.parametrize("recipe_name", [None, *RECIPES])
@pytest.mark.parametrize("name", MODULES)
def test_weight_gradients_are_added_to_main_grad(te_module: ModuleType, name: str, recipe_name: str | None) -> None:
    plain, fused = make(te_module, name), make(te_module, name, fuse_wgrad_accumulation=True)
    recipes = make_recipe(recipe_name), make_recipe(recipe_name)
    for parameter in weights(fused).values():
        parameter.main_grad = torch.full(parameter.shape, 3.0)  # type: ignore[attr-defined]
    step(te_module, plain, recipes[0])
    step(te_module, fused, recipes[1])
    for key, parameter in weights(fused).items():
        expected = weights(plain)[key].grad
        assert expected is not None
        added = parameter.main_grad - 3.0  # type: ignore[attr-defined]
        # The plain gradient is rounded to BF16; main_grad holds FP32 sums.
        torch.testing.assert_close(added, expected.float(), rtol=2.0**-7, atol=1e-4)
        assert not torch.equal(added, expected.float())


@pytest.mark.parametrize("recipe_name", [None, *RECIPES])
@pytest.mark.parametrize("name", MODULES)
def test_weight_gradients_can_be_computed_later(te_module: ModuleType, name: str, recipe_name: str | None) -> None:
    plain, delayed = make(te_module, name), make(te_module, name, delay_wgrad_compute=True)
    step(te_module, plain, make_recipe(recipe_name))
    step(te_module, delayed, make_recipe(recipe_name))
    assert all(parameter.grad is None for parameter in weights(delayed).values())
    delayed.backward_dw()
    for key, parameter in plain.named_parameters():
        assert torch.equal(delayed.get_parameter(key).grad, parameter.grad)


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_fp8_parameters_compute_what_casts_of_them_compute(te_module: ModuleType, name: str, recipe_name: str) -> None:
    with te_module.quantized_model_init(recipe=make_recipe(recipe_name)):
        quantized = make(te_module, name)
    plain = make(te_module, name)
    for key, parameter in quantized.named_parameters():
        value = parameter.dequantize() if hasattr(parameter, "_quantizer") else parameter
        plain.get_parameter(key).data.copy_(value)
    assert {type(p).__name__ for p in weights(quantized).values()} == {"Float8Tensor"}
    y, expected = step(te_module, quantized, make_recipe(recipe_name)), step(te_module, plain, make_recipe(recipe_name))
    # A weight that is a cast of codes has these very codes again if its scale is the codes' scale.
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
    for key, parameter in weights(quantized).items():
        assert parameter.grad is not None
        assert parameter.grad.dtype == BF16
        error = (parameter.grad.float() - plain.get_parameter(key).grad.float()).norm()
        assert error <= 0.1 * plain.get_parameter(key).grad.float().norm()


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_a_torch_optimizer_steps_on_fp8_parameters(te_module: ModuleType, recipe_name: str) -> None:
    with te_module.quantized_model_init(recipe=make_recipe(recipe_name)):
        module = make(te_module, "Linear", dtype=FP32, bias=False)
    before = module.weight.dequantize()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    step(te_module, module, make_recipe(recipe_name))
    grad = module.weight.grad.clone()
    optimizer.step()
    after = module.weight.dequantize()
    assert type(module.weight.data).__name__ == "Float8Tensor"
    assert (after - (before - 1e-4 * grad)).abs().max() <= 2.0**-4 * after.abs().max()
    assert not torch.equal(after, before)


@pytest.mark.parametrize("recipe_name", [None, *RECIPES])
@pytest.mark.parametrize("name", [*MODULES, "GroupedLinear"])
def test_training_resumes_from_a_checkpoint_to_the_bit(
    te_module: ModuleType, name: str, recipe_name: str | None
) -> None:
    def build() -> tuple[Any, Any, Any]:
        if name == "GroupedLinear":
            torch.manual_seed(0)
            module = te_module.GroupedLinear(1, WIDTH, FFN, params_dtype=BF16, device="cpu")
            forward = module.forward
            module.forward = lambda x: forward(x, [ROWS])
        else:
            module = make(te_module, name)
        return module, torch.optim.SGD(module.parameters(), lr=0.02), make_recipe(recipe_name)

    def train(module: Any, optimizer: Any, recipe: Any, seeds: range) -> list[Tensor]:
        outputs = []
        for seed in seeds:
            optimizer.zero_grad()
            outputs.append(step(te_module, module, recipe, seed))
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


def test_a_checkpoint_of_delayed_scaling_holds_its_amax_history(te_module: ModuleType) -> None:
    module, recipe = make(te_module, "Linear"), make_recipe("DelayedScaling")
    for seed in range(3):
        step(te_module, module, recipe, seed)
    state, fresh = module.state_dict(), make(te_module, "Linear")
    assert state["_extra_state"].numel() > 0
    fresh.load_state_dict(state)
    for direction in ("scaling_fwd", "scaling_bwd"):
        saved, loaded = module.fp8_meta[direction], fresh.fp8_meta[direction]
        assert torch.equal(saved.amax_history, loaded.amax_history)
        assert torch.equal(saved.scale, loaded.scale)
        assert saved.amax_history.any()
