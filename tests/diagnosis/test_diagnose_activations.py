"""Activations and gated units of the reference, also those that TE does not have, and where a port has another one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

HIDDEN, FFN, ROWS = 64, 96, 64


class Gated(nn.Module):
    """A gated MLP whose activation is ``act``; a whole unit ``[..., 2 * ffn]`` where ``unit`` is given."""

    def __init__(self, linear, act=None, unit=None) -> None:
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
    """An activation before each layer: of the condition, and of what it is added to."""

    def __init__(self, linear, first=F.silu, second=F.gelu) -> None:
        super().__init__()
        self.fc1, self.fc2 = linear(HIDDEN, HIDDEN), linear(HIDDEN, HIDDEN)
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.second(self.fc1(self.first(x)) + x))


def clamped(limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0):
    """The gated unit of gpt-oss, multiplied in its own order."""

    def unit(y: Tensor) -> Tensor:
        gate, up = y.chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + offset) * gate * torch.sigmoid(alpha * gate)

    return unit


def found(module, reference, port):
    def factory(te, **_):
        names = [f"{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")]
        return parity.Pair(
            module(nn.Linear, **reference),
            module(te.Linear, **port),
            inputs=lambda rng, rows: 2.0 * rng.normal(rows, HIDDEN),
            weights={name: name for name in names},
        )

    (result,) = parity.compare(parity.Case("activation", factory, sizes=(dict(rows=ROWS),)), ["fp32"])
    assert result.status == "failed"
    return [(finding.title, finding.message.split("; ")[-1]) for finding in result.findings]


@pytest.mark.parametrize("right", [F.mish, F.hardswish, F.softplus, F.elu, F.leaky_relu])
def test_an_activation_that_te_does_not_have_is_known(right):
    assert found(Gated, dict(act=right), dict(act=F.silu)) == [("activation", "it computes silu")]


@pytest.mark.parametrize(
    ("port", "computed"),
    [
        (clamped(limit=5.0), "limit=5 alpha=1.702 offset=1"),
        (clamped(limit=1e4), "limit=inf alpha=1.702 offset=1"),
        (clamped(alpha=1.0), "limit=7 alpha=1 offset=1"),
        (clamped(offset=0.0), "limit=7 alpha=1.702 offset=0"),
    ],
)
def test_the_constants_of_a_clamped_unit_are_told_whatever_is_multiplied_first(port, computed):
    assert found(Gated, dict(unit=clamped()), dict(unit=port)) == [("activation", f"it computes {computed}")]


@pytest.mark.parametrize(
    ("port", "told"),
    [
        (dict(first=torch.relu), "it computes relu in the module, the 1st of 2 there"),
        (dict(second=torch.relu), "it computes relu in the module, the 2nd of 2 there"),
    ],
)
def test_the_place_of_an_activation_among_others_is_told(port, told):
    assert found(Conditioned, {}, port) == [("activation", told)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_tes_gelu_is_told_as_the_one_that_te_computes(precision):
    def factory(te) -> parity.Pair:
        plain = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
        names = {"0": "layer_norm_", "1": "fc1_", "3": "fc2_"}
        weights = {f"{i}.{kind}": f"{name}{kind}" for i, name in names.items() for kind in ("weight", "bias")}
        return parity.Pair(plain, te.LayerNormMLP(64, 96), lambda rng: rng.normal(48, 64), weights)

    (result,) = parity.compare(parity.Case("mlp", factory, sizes=({},)), [precision])
    assert "it computes gelu (tanh)" in result.findings[0].message


def test_a_leaky_relu_in_the_place_of_another_activation_is_told_with_its_slope():
    ((title, message),) = found(Gated, dict(act=F.relu), dict(act=lambda x: F.leaky_relu(x, 0.1)))
    assert title == "activation"
    assert message.startswith("it computes a leaky relu of slope 0.1")
