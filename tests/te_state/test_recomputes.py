"""A layer that the backward pass computes again outside of the recipe is a mistake, though no tolerance shows it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parity
from parity.report import failure
from parity.report.items import Item

te = parity.te.kernels("cpu").te
HIDDEN = 64
WEIGHTS = {f"layers.{i}.{name}": f"layers.{i}.{name}" for i in range(2) for name in ("weight", "bias")}


class Layers(nn.Module):
    """Two layers, called as it is told."""

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
    assert result.margin < 1  # which is why it is looked for
    (found,) = result.findings
    assert (found.code, found.title) == ("PAR308", "recomputed-otherwise")
    assert found.message.startswith("layers.0 runs under ")
    assert "and under no recipe where the backward pass computes it again" in found.message
    told = failure.message(Item((result,)))
    assert told.startswith("PAR308 recomputed-otherwise: every tensor is within its tolerance, and the port is wrong")


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
    assert "where a recipe is on, use te.checkpoint" in result.reason


def test_nothing_is_watched_afterwards():
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before = dict(hooks)
    compared(outside, "bf16")
    assert dict(hooks) == before
