"""Test TE's own ways with weights: quantized parameters, main_grad, and layers that are recomputed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parity
from parity.report import failure
from parity.report.record import Item

# A port whose parameters TE keeps quantized (``te.quantized_model_init``) is compared like any other.


WIDTH = 128
RECIPES = {
    "fp8_delayed": "DelayedScaling",
    "fp8_current": "Float8CurrentScaling",
    "fp8_block": "Float8BlockScaling",
}


def compare(precision: str, recipe: str, dtype: torch.dtype, activation: str = "gelu") -> parity.Result:
    def factory(te: Any, batch: int) -> parity.Pair:
        from transformer_engine.common import recipe as recipes

        with te.quantized_model_init(enabled=True, recipe=getattr(recipes, recipe)()):
            port = te.LayerNormMLP(WIDTH, WIDTH, params_dtype=dtype, activation=activation)
        return parity.Pair(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU("tanh"), nn.Linear(WIDTH, WIDTH)),
            port,
            lambda rng, batch: rng.normal(batch, WIDTH),
            MLP,
        )

    (result,) = parity.compare(parity.Case("quantized", factory, sizes=(dict(batch=128),)), [precision])
    return result


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        *((precision, torch.bfloat16) for precision in RECIPES),
        ("fp8_delayed", torch.float32),
        ("fp8_current", torch.float32),
    ],
)
def test_parameters_of_either_dtype_are_trained_and_agree(precision: str, dtype: torch.dtype) -> None:
    result = compare(precision, RECIPES[precision], dtype)
    assert result.passed, (result.reason, result.margin, result.findings)


def test_a_mistake_is_found_in_such_a_port_as_well() -> None:
    result = compare("fp8_current", "Float8CurrentScaling", torch.float32, activation="relu")
    assert result.findings[0].title == "activation"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_precision_without_a_recipe_is_refused(precision: str) -> None:
    result = compare(precision, "DelayedScaling", torch.bfloat16)
    assert result.status == "error"
    assert "holds fc1_weight and 1 more quantized" in result.reason


def test_parameters_that_te_keeps_in_another_dtype_are_refused() -> None:
    """Expect an error, because TE's block-scaled tensors keep the dtype in which they were made."""
    result = compare("fp8_block", "Float8BlockScaling", torch.float32)
    assert result.status == "error"
    assert result.reason.endswith("build the module with params_dtype=torch.bfloat16")


# A weight gradient that TE adds to ``main_grad`` is compared like one in ``grad``.


HIDDEN_OF_MAIN_GRAD = 64
MLP = {
    "0.weight": "layer_norm_weight",
    "0.bias": "layer_norm_bias",
    "1.weight": "fc1_weight",
    "1.bias": "fc1_bias",
    "3.weight": "fc2_weight",
    "3.bias": "fc2_bias",
}


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(HIDDEN_OF_MAIN_GRAD),
        nn.Linear(HIDDEN_OF_MAIN_GRAD, HIDDEN_OF_MAIN_GRAD),
        nn.GELU("tanh"),
        nn.Linear(HIDDEN_OF_MAIN_GRAD, HIDDEN_OF_MAIN_GRAD),
    )


class Microbatched(nn.Module):
    """A layer that runs two microbatches after ``prepare`` has changed its weight."""

    def __init__(self, te: Any, prepare: Any = lambda weight: None, **options: Any) -> None:
        super().__init__()
        self.linear = te.Linear(HIDDEN_OF_MAIN_GRAD, HIDDEN_OF_MAIN_GRAD, fuse_wgrad_accumulation=True)
        self.prepare, self.options = prepare, options

    def forward(self, x: Tensor) -> Tensor:
        self.prepare(self.linear.weight)
        return torch.cat([self.linear(part, **self.options) for part in x.chunk(2)])


def compare_main_grad(
    reference: Any, candidate: Any, weights: dict[str, str], precision: str = "bf16"
) -> parity.Result:
    def factory(te: Any, batch: int) -> parity.Pair:
        return parity.Pair(
            reference(), candidate(te), lambda rng, batch: rng.normal(batch, HIDDEN_OF_MAIN_GRAD), weights
        )

    (result,) = parity.compare(parity.Case("main grad", factory, sizes=(dict(batch=32),)), [precision])
    return result


def microbatched(prepare: Any = lambda weight: None, **options: Any) -> parity.Result:
    return compare_main_grad(
        lambda: nn.Linear(HIDDEN_OF_MAIN_GRAD, HIDDEN_OF_MAIN_GRAD),
        lambda te: Microbatched(te, prepare, **options),
        {"weight": "linear.weight", "bias": "linear.bias"},
    )


def with_own_main_grad(weight: Any) -> None:
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)


def handed_over_by_a_hook(weight: Any) -> None:
    def hand_over(weight: Any) -> None:
        weight.grad = weight.main_grad.to(weight.dtype)

    if not hasattr(weight, "hooked"):
        weight.hooked = weight.register_post_accumulate_grad_hook(hand_over)


def overwriting(weight: Any) -> None:
    weight.overwrite_main_grad = True


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_delayed", "fp8_current"])
def test_a_module_without_main_grad_is_given_one(precision: str) -> None:
    fused = compare_main_grad(
        mlp,
        lambda te: te.LayerNormMLP(HIDDEN_OF_MAIN_GRAD, HIDDEN_OF_MAIN_GRAD, fuse_wgrad_accumulation=True),
        MLP,
        precision,
    )
    assert fused.passed


def test_an_operation_of_te_is_given_one_as_well() -> None:
    weights = {"weight": "weight", "bias": "bias"}
    assert compare_main_grad(
        lambda: nn.Linear(HIDDEN_OF_MAIN_GRAD, HIDDEN_OF_MAIN_GRAD),
        lambda te: te.ops.Linear(HIDDEN_OF_MAIN_GRAD, HIDDEN_OF_MAIN_GRAD, accumulate_into_main_grad=True),
        weights,
    ).passed


@pytest.mark.parametrize("prepare", [lambda weight: None, with_own_main_grad, handed_over_by_a_hook])
def test_microbatches_add_up_whoever_makes_main_grad(prepare: Any) -> None:
    assert microbatched(prepare).passed


@pytest.mark.parametrize(("prepare", "options"), [(overwriting, {}), (lambda w: None, dict(is_first_microbatch=True))])
def test_a_microbatch_that_overwrites_the_others_is_told(prepare: Any, options: dict[str, Any]) -> None:
    result = microbatched(prepare, **options)
    assert [finding.title for finding in result.findings] == ["gradient-accumulation"]


def test_a_weight_that_pytorch_uses_as_well_gets_both_parts() -> None:
    class Tied(nn.Module):
        def __init__(self, linear: Any) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + F.linear(x * x, self.linear.weight)

    weights = {"linear.weight": "linear.weight", "linear.bias": "linear.bias"}
    assert compare_main_grad(
        lambda: Tied(nn.Linear(HIDDEN_OF_MAIN_GRAD, HIDDEN_OF_MAIN_GRAD)),
        lambda te: Tied(te.Linear(HIDDEN_OF_MAIN_GRAD, HIDDEN_OF_MAIN_GRAD, fuse_wgrad_accumulation=True)),
        weights,
    ).passed


def test_a_weight_that_is_not_used_has_no_gradient() -> None:
    class Unused(nn.Module):
        def __init__(self, te: Any) -> None:
            super().__init__()
            self.linear = te.Linear(HIDDEN_OF_MAIN_GRAD, HIDDEN_OF_MAIN_GRAD, fuse_wgrad_accumulation=True)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.linear.weight.detach(), self.linear.bias)

    result = compare_main_grad(
        lambda: nn.Linear(HIDDEN_OF_MAIN_GRAD, HIDDEN_OF_MAIN_GRAD),
        Unused,
        {"weight": "linear.weight", "bias": "linear.bias"},
    )
    assert [finding.title for finding in result.findings] == ["no-gradient"]


# A layer that the backward pass recomputes outside of the recipe is a mistake, although no tolerance shows it.


te = parity.te.kernels("cpu").te
HIDDEN = 64
WEIGHTS = {f"layers.{i}.{name}": f"layers.{i}.{name}" for i in range(2) for name in ("weight", "bias")}


class Layers(nn.Module):
    """Two layers that run as ``call`` runs them."""

    def __init__(self, linear, call=lambda layers, x: layers(x)) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(HIDDEN, 2 * HIDDEN), linear(2 * HIDDEN, HIDDEN))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layers, x)


def compared(call, *precisions: str) -> list[parity.Result]:
    def factory(te, **_):
        return parity.Pair(Layers(nn.Linear), Layers(te.Linear, call), lambda rng: rng.normal(32, HIDDEN), WEIGHTS)

    return parity.compare(parity.Case("layers", factory, sizes=({},)), precisions)


def outside(layers, x):
    return checkpoint(layers, x, use_reentrant=True)


def outside_in_part(layers, x):
    return layers[1](checkpoint(layers[0], x, use_reentrant=True))


def outside_after_its_own(layers, x):
    with te.autocast(enabled=True, recipe=te.quantization.get_default_fp8_recipe()):
        return checkpoint(layers, x, use_reentrant=True)


def same_recipe():
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    enabled = Manager.is_fp8_enabled()
    return nullcontext(), te.autocast(enabled=enabled, recipe=Manager.get_fp8_recipe() if enabled else None)


def left_out(layers, x):
    with te.autocast(enabled=False):
        x = layers[0](x)
    return layers[1](x)


def left_out_and_computed_again(layers, x):
    with te.autocast(enabled=False):
        x = checkpoint(layers[0], x, use_reentrant=True)
    return layers[1](x)


RIGHT = {
    "TE's, reentrant": lambda layers, x: te.checkpoint(layers, x, use_reentrant=True),
    "TE's, not reentrant": lambda layers, x: te.checkpoint(layers, x, use_reentrant=False),
    "context_fn": lambda layers, x: checkpoint(layers, x, use_reentrant=False, context_fn=same_recipe),
    "a layer that is left out": left_out,
    "a layer that is left out and computed again": left_out_and_computed_again,
}


@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current", "fp8_block"])
@pytest.mark.parametrize("call", [outside, outside_in_part])
def test_what_is_computed_again_outside_of_the_recipe_fails(call, precision):
    (result,) = compared(call, precision)
    assert result.status == "failed"
    assert result.margin < 1  # no tolerance shows it
    (found,) = result.findings
    assert (found.code, found.title) == ("PAR308", "recomputed-otherwise")
    assert found.message.startswith("layers.0 runs under ")
    assert "but under no recipe when the backward pass recomputes it" in found.message
    told = failure.message(Item((result,)))
    assert told.startswith(
        "PAR308 recomputed-otherwise: every tensor is within its tolerance, but the port is still wrong"
    )


def test_so_does_what_leaves_a_recipe_of_its_own():
    bf16, *_ = compared(outside_after_its_own, "bf16")
    assert bf16.findings[0].title == "recomputed-otherwise"


@pytest.mark.parametrize("call", RIGHT.values(), ids=RIGHT)
def test_what_is_computed_again_as_it_was_is_right(call):
    results = compared(call, "bf16", "fp8_delayed", "fp8_current", "fp8_block")
    assert {result.status for result in results} == {"passed"}


def test_without_a_recipe_pytorchs_checkpoint_is_right():
    assert {result.status for result in compared(outside, "fp32", "bf16")} == {"passed"}


def test_where_pytorch_itself_refuses_it_is_said_what_to_do():
    (result,) = compared(lambda layers, x: checkpoint(layers, x, use_reentrant=False), "fp8_current")
    assert result.status == "error"
    assert "under a recipe, use te.checkpoint" in result.reason


def test_nothing_is_watched_afterwards():
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before = dict(hooks)
    compared(outside, "bf16")
    assert dict(hooks) == before
