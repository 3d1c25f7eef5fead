"""Activations and gated units of references, including those that TE lacks, and ports that have a different one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import compared, in_turn, normal, tells, tells_only, twins
from torch import Tensor, nn

import parity

HIDDEN, FFN = 64, 96


class Gated(nn.Module):
    """A gated MLP with the activation ``act``, or with ``unit`` for a whole gated unit ``[..., 2 * ffn]``."""

    def __init__(self, linear: Any, act: Any = None, unit: Any = None) -> None:
        super().__init__()
        self.fc1, self.fc2 = linear(HIDDEN, 2 * FFN), linear(FFN, HIDDEN)
        self.act, self.unit = act, unit

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(4.0 * x)
        if self.unit:
            return self.fc2(self.unit(y))
        gate, up = y.chunk(2, -1)
        return self.fc2(self.act(gate) * up)


class Conditioned(nn.Module):
    """Two layers, each behind an activation: of the condition, and of the sum of both."""

    def __init__(self, linear: Any, first: Any = F.silu, second: Any = F.gelu) -> None:
        super().__init__()
        self.fc1, self.fc2 = linear(HIDDEN, HIDDEN), linear(HIDDEN, HIDDEN)
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.second(self.fc1(self.first(x)) + x))


def clamped(limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Return the gated unit of gpt-oss, with its factors in another order."""

    def unit(y: Tensor) -> Tensor:
        gate, up = y.chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + offset) * gate * torch.sigmoid(alpha * gate)

    return unit


def in_units(module: type[nn.Module], right: dict[str, Any], wrong: dict[str, Any]) -> parity.Result:
    return twins(module, wrong, lambda rng: 2.0 * rng.normal(64, HIDDEN), "fp32", right)


@pytest.mark.parametrize(
    ("module", "right", "port", "phrase"),
    [
        *(
            (Gated, dict(act=act), dict(act=F.silu), "it computes silu.")
            for act in (F.mish, F.hardswish, F.softplus, F.elu, F.leaky_relu)
        ),
        (Gated, dict(act=F.relu), dict(act=lambda x: F.leaky_relu(x, 0.1)), "it computes a leaky relu with slope 0.1"),
        (Gated, dict(unit=clamped()), dict(unit=clamped(limit=5.0)), "it computes limit=5 alpha=1.702 offset=1."),
        (Gated, dict(unit=clamped()), dict(unit=clamped(limit=1e4)), "it computes limit=inf alpha=1.702 offset=1."),
        (Gated, dict(unit=clamped()), dict(unit=clamped(alpha=1.0)), "it computes limit=7 alpha=1 offset=1."),
        (Gated, dict(unit=clamped()), dict(unit=clamped(offset=0.0)), "it computes limit=7 alpha=1.702 offset=0."),
        (Conditioned, {}, dict(first=torch.relu), "it computes relu in the module, the 1st of 2 there."),
        (Conditioned, {}, dict(second=torch.relu), "it computes relu in the module, the 2nd of 2 there."),
    ],
)
def test_another_activation_is_told_with_its_place_and_its_constants(module, right, port, phrase):
    tells_only(in_units(module, right, port), "activation", phrase)


def test_tes_gelu_is_told_as_the_one_that_te_computes():
    names = {"0": "layer_norm_", "1": "fc1_", "3": "fc2_"}
    result = compared(
        lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)),
        lambda te: te.LayerNormMLP(64, 96),
        normal((48, 64)),
        "fp8_current",
        {f"{i}.{kind}": f"{name}{kind}" for i, name in names.items() for kind in ("weight", "bias")},
    )
    tells(result, "activation", "it computes gelu (tanh)")


# Activations that a reference clamps, in place or not, as OLMo clamps queries, keys and values.


class Clamped(nn.Module):
    """Two linear layers, whose results are clamped as OLMo clamps queries, keys and values."""

    def __init__(self, linear: Any, limit: float, in_place: bool = False, both: bool = True) -> None:
        super().__init__()
        self.first, self.second = linear(64, 128), linear(128, 64)
        self.limit, self.in_place, self.both = limit, in_place, both

    def forward(self, x: Tensor) -> Tensor:
        return self.clamped(self.second(self.clamped(self.first(x))))

    def clamped(self, x: Tensor) -> Tensor:
        if self.in_place:
            x.clamp_(min=-self.limit, max=self.limit)
            return x
        if not self.both:
            return x.clamp(max=self.limit)
        return x if math.isinf(self.limit) else x.clamp(-self.limit, self.limit)


@pytest.mark.parametrize(
    ("in_place", "limit", "title", "told"),
    [
        (False, 0.5, "passed", ""),
        (True, 0.5, "passed", ""),
        (False, math.inf, "operation", "the port does not clamp them"),
        (True, 0.75, "operation", "they are clamped between -0.75 and 0.75"),
    ],
)
def test_another_range_of_clamped_activations_is_told(in_place, limit, title, told):
    result = compared(lambda: Clamped(nn.Linear, 0.5, in_place), lambda te: Clamped(te.Linear, limit), normal((64, 64)))
    tells_only(result, title, f"clamp activations between -0.5 and 0.5, as the reference does; {told}")


@pytest.mark.parametrize(
    ("both", "told"),
    [
        (True, "between -0.5 and 0.5, as the reference does; they are clamped to at most 0.5"),
        (False, "to at most 0.5, as the reference does; they are clamped between -0.5 and 0.5"),
    ],
)
def test_activations_that_are_clamped_at_other_ends_are_told(both, told):
    right, wrong = (lambda linear, both=both: Clamped(linear, 0.5, both=both) for both in (both, not both))
    result = compared(lambda: right(nn.Linear), lambda te: wrong(te.Linear), normal((64, 64)))
    tells_only(result, "operation", f"clamp activations {told}")


class Embedded(nn.Module):
    """Add sines of large times to tokens; a port may put an extra activation before or after the layers."""

    def __init__(self, linear: Any, before: bool = False, after: bool = False) -> None:
        super().__init__()
        self.embed, self.out, self.before, self.after = linear(64, 64), linear(64, 64), before, after

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        angles = 500.0 * times[:, :1].float().abs() * 0.75 ** torch.arange(32, device=x.device)
        waves = torch.cat((angles.cos(), angles.sin()), -1).to(x.dtype)
        y = x + self.embed(F.silu(waves) if self.before else waves)[:, None]
        y = self.out(F.layer_norm(y, (64,)))
        return x + (F.silu(y) if self.after else y)


@in_turn(
    ("port", "title", "phrase"),
    [
        ({}, "passed", ""),
        (
            dict(before=True),
            "activation",
            "1st 'linear' of embed reads as it is, as the reference does; the port applies silu",
        ),
        (
            dict(after=True),
            "activation",
            "1st 'linear' of out returns as it is, as the reference does; the port applies silu",
        ),
    ],
)
def test_an_activation_that_the_reference_does_not_have_is_told_with_its_place(port, title, phrase, precision):
    tells(twins(Embedded, port, normal((4, 24, 64), (4, 64)), precision), title, phrase)


class Deep(nn.Module):
    """Layers of two linear layers each; the first of each may add its bias twice."""

    def __init__(self, linear: Any, layers: int = 9, twice: bool = False) -> None:
        super().__init__()
        self.up, self.down = (nn.ModuleList(linear(64, 64) for _ in range(layers)) for _ in range(2))
        for one in self.up:
            nn.init.normal_(one.bias, std=0.3)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            y = up(x)
            x = x + down((y + up.bias if self.twice else y).tanh())
        return x


def test_a_bias_that_is_added_twice_in_each_of_many_layers_is_told():
    """Plant the mistake in one of two biases of each layer, which are too many to try each one alone."""
    result = twins(Deep, dict(twice=True), normal((2, 32, 64)))
    tells_only(result, "bias-added-twice", "the port adds it twice in up.#.bias")
