"""Two steps that a port takes in the other order are told by both, where no mistake with a meaning explains."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH = 64


class Scaled(nn.Module):
    """A residual branch whose result, bias included, is scaled, as Granite's."""

    def __init__(self, linear, norm, right: bool = True) -> None:
        super().__init__()
        self.up, self.right = linear(WIDTH, WIDTH), right

    def forward(self, x: Tensor) -> Tensor:
        if self.right:
            return x + 0.22 * self.up(x)
        return x + 0.22 * (self.up(x) - self.up.bias) + self.up.bias


class Gated(nn.Module):
    """Mamba 2's gate, which multiplies before the norm, and its residual connection."""

    def __init__(self, linear, norm, right: bool = True) -> None:
        super().__init__()
        self.up, self.norm, self.down = linear(WIDTH, 2 * WIDTH), norm(WIDTH), linear(WIDTH, WIDTH)
        self.right = right

    def forward(self, x: Tensor) -> Tensor:
        y, gate = F.silu(self.up(x)).chunk(2, -1)
        return x + self.down(self.norm(y * gate) if self.right else self.norm(y) * gate)


class Grouped(nn.Module):
    """Mamba 2's norm in two groups behind its gate, all in plain PyTorch, or before its gate."""

    def __init__(self, linear, norm, right: bool = True, gate_first: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.gate_first = linear(WIDTH, 4 * WIDTH), linear(2 * WIDTH, WIDTH), gate_first is right
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 2 * WIDTH))

    def normed(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (2, -1))
        return (groups * (groups.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(-2) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.up(x).chunk(2, -1)
        gate = F.silu(gate)
        return x + self.down(self.normed(y * gate) if self.gate_first else self.normed(y) * gate)


class GateLast(Grouped):
    """The norm with its gain comes before the gate; a port has it behind."""

    def __init__(self, linear, norm, right: bool = True) -> None:
        super().__init__(linear, norm, right, gate_first=False)


class Activated(nn.Module):
    """An activation before a norm."""

    def __init__(self, linear, norm, right: bool = True) -> None:
        super().__init__()
        self.up, self.norm, self.right = linear(WIDTH, WIDTH), norm(WIDTH), right

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.silu(self.up(x))) if self.right else F.silu(self.norm(self.up(x)))


class Standardized(nn.Module):
    """Inputs less their mean, divided by their deviation."""

    def __init__(self, linear, norm, right: bool = True) -> None:
        super().__init__()
        self.up, self.right = linear(WIDTH, WIDTH), right
        self.register_buffer("mean", torch.linspace(-1.0, 1.0, WIDTH))
        self.register_buffer("deviation", torch.linspace(0.5, 2.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.up((x - self.mean) / self.deviation if self.right else x / self.deviation - self.mean)


class WeightedTokens(nn.Module):
    """A layer whose result is weighted by token; a port weights what the layer is given, and not its bias."""

    def __init__(self, linear, norm, right: bool = True) -> None:
        super().__init__()
        self.layers, self.right = nn.ModuleList(linear(WIDTH, 2 * WIDTH) for _ in range(2)), right

    def forward(self, x: Tensor) -> Tensor:
        weight = x[..., :1].sigmoid()
        return sum(layer(x) * weight if self.right else layer(x * weight) for layer in self.layers)


class WeightedInputs(nn.Module):
    """The reverse: what the layer is given is weighted; a port weights its result, bias included."""

    def __init__(self, linear, norm, right: bool = True) -> None:
        super().__init__()
        self.layer, self.right = linear(WIDTH, 2 * WIDTH), right

    def forward(self, x: Tensor) -> Tensor:
        weight = x[..., :1].sigmoid()
        return self.layer(x * weight) if self.right else self.layer(x) * weight


MODULES = {
    Scaled: "take up.bias before the 1st 'mul' of the module, as the reference does; they are in the other order",
    Gated: "take the 1st 'mul' of the module before the norm of norm, as the reference does",
    Grouped: "take the 1st 'mul' of the module before the norm of the module, as the reference does",
    GateLast: "take the norm of the module before the 3rd 'mul' of the module, as the reference does",
    Activated: "take the silu of the module before the norm of norm, as the reference does",
    Standardized: "take the 1st 'sub' of the module before the 1st 'div' of the module, as the reference does",
    WeightedTokens: "take layers.0.bias before the 1st 'mul' of the module, as the reference does, and so for 1 more",
    WeightedInputs: "take the 1st 'mul' of the module before the layer of layer.bias, as the reference does",
}


def results(module, right: bool, precisions=("fp32", "bf16"), also=lambda output: output):
    def factory(te, **_):
        reference = module(nn.Linear, nn.RMSNorm)
        return parity.Pair(
            reference,
            module(te.Linear, lambda width: te.RMSNorm(width, eps=torch.finfo(torch.float32).eps), right),
            inputs=lambda rng: rng.normal(2, 16, WIDTH),
            weights={name: name for name, _ in reference.named_parameters()},
            call_candidate=lambda module, x: also(module(x)),
        )

    return parity.compare(parity.Case("order", factory, sizes=({},)), precisions)


@pytest.mark.parametrize("module", MODULES)
def test_the_other_order_is_told(module):
    for result in results(module, right=False):
        assert [one.title for one in result.findings] == ["operation"], result.item
        assert MODULES[module] in result.findings[0].message


@pytest.mark.parametrize("module", MODULES)
def test_the_same_order_passes(module):
    assert {result.status for result in results(module, right=True)} == {"passed"}


def test_an_eps_that_fits_best_by_chance_is_not_told_where_something_else_is_wrong_too():
    (result,) = results(
        Gated, right=False, precisions=["fp32"], also=lambda output: output + 0.003 * torch.sin(9 * output)
    )
    assert {one.title for one in result.findings} <= {"unexplained", "first-divergence"}
