"""Other activations and gated units, including those that TE lacks, other ranges of values, and biases added twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.small import Host, normal, twins

HIDDEN, FFN = 64, 96
WIDE = normal((64, HIDDEN), scale=2.0)


class Gate(nn.Module):
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


def clamped(limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Return the gated unit of gpt-oss, with its factors in another order."""

    def unit(y: Tensor) -> Tensor:
        gate, up = y.chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + offset) * gate * torch.sigmoid(alpha * gate)

    return unit


class Conditioned(nn.Module):
    """Two layers, each behind an activation: of the condition, and of the sum of both."""

    def __init__(self, linear: Any, first: Any = F.silu, second: Any = F.gelu) -> None:
        super().__init__()
        self.fc1, self.fc2 = linear(HIDDEN, HIDDEN), linear(HIDDEN, HIDDEN)
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.second(self.fc1(self.first(x)) + x))


class Clamped(nn.Module):
    """Two linear layers, whose results are clamped as OLMo clamps queries, keys and values."""

    def __init__(self, linear: Any, limit: float = 0.5, in_place: bool = False, both: bool = True) -> None:
        super().__init__()
        self.first, self.second = linear(HIDDEN, 128), linear(128, HIDDEN)
        self.limit, self.in_place, self.both = limit, in_place, both

    def forward(self, x: Tensor) -> Tensor:
        return self.clamped(self.second(self.clamped(self.first(x))))

    def clamped(self, x: Tensor) -> Tensor:
        if self.in_place:
            x.clamp_(min=-self.limit, max=self.limit)
            return x
        if not self.both:
            return x.clamp(max=self.limit)
        return x.clamp(-self.limit, self.limit) if self.limit else x


class Waves(nn.Module):
    """Add sines of large times to tokens; a port may put an extra activation before or after the layers."""

    def __init__(self, linear: Any, before: bool = False, after: bool = False) -> None:
        super().__init__()
        self.embed, self.out, self.before, self.after = linear(64, 64), linear(64, 64), before, after

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        angles = 500.0 * times.float().abs() * 0.75 ** torch.arange(32, device=x.device)
        waves = torch.cat((angles.cos(), angles.sin()), -1).to(x.dtype)
        y = x + self.embed(F.silu(waves) if self.before else waves)[:, None]
        y = self.out(F.layer_norm(y, (64,)))
        return x + (F.silu(y) if self.after else y)


class Deep(nn.Module):
    """Layers of two linear layers each, too many biases to try each one alone; a port adds the first of each twice."""

    def __init__(self, linear: Any, twice: bool = False) -> None:
        super().__init__()
        self.up, self.down = (nn.ModuleList(linear(64, 64) for _ in range(9)) for _ in range(2))
        for one in list[Any](self.up):
            nn.init.normal_(one.bias, std=0.3)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            y = up(x)
            x = x + down((y + up.bias if self.twice else y).tanh())
        return x


ACTS: tuple[Any, ...] = (F.mish, F.hardswish, F.softplus, F.elu, F.leaky_relu, F.relu)
GATES = {act.__name__: twins(Gate, WIDE, f"gate_of_{act.__name__}", settings=dict(act=act)) for act in ACTS}
UNIT = twins(Gate, WIDE, "clamped_unit", settings=dict(unit=clamped()))
CONDITIONED, CLAMPED = twins(Conditioned, WIDE), twins(Clamped, normal((64, HIDDEN)))
IN_PLACE = twins(Clamped, normal((64, HIDDEN)), "clamped_in_place", settings=dict(in_place=True))
ONE_END = twins(Clamped, normal((64, HIDDEN)), "clamped_at_one_end", settings=dict(both=False))
WAVES, DEEP = twins(Waves, normal((4, 24, 64), (4, 1))), twins(Deep, normal((2, 32, 64)))
TE_MLP = Host(
    "mlp_of_te",
    lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)),
    lambda te, activation="relu": te.LayerNormMLP(64, 96, activation=activation),
    normal((48, 64)),
    weights={
        f"{number}.{kind}": f"{name}_{kind}"
        for number, name in (("0", "layer_norm"), ("1", "fc1"), ("3", "fc2"))
        for kind in ("weight", "bias")
    },
)
CLAMP, AS_IS = "clamp activations between -0.5 and 0.5, as the reference does; ", "as it is, as the reference does; "

PORTS = (
    *(GATES[act].wrong("activation", "it computes silu.", act=F.silu) for act in GATES if act != "relu"),
    GATES["relu"].wrong(
        "activation",
        "it computes a leaky relu with slope 0.1",
        name="leaky relu",
        act=lambda x: F.leaky_relu(x, 0.1),
    ),
    UNIT.wrong("activation", "it computes limit=inf alpha=1.702 offset=1.", name="no limit", unit=clamped(limit=1e4)),
    UNIT.wrong("activation", "it computes limit=7 alpha=1 offset=1.", name="alpha 1", unit=clamped(alpha=1.0)),
    UNIT.wrong("activation", "it computes limit=7 alpha=1.702 offset=0.", name="no offset", unit=clamped(offset=0.0)),
    CONDITIONED.wrong("activation", "it computes relu in the module, the 1st of 2 there.", first=torch.relu),
    CONDITIONED.wrong("activation", "it computes relu in the module, the 2nd of 2 there.", second=torch.relu),
    TE_MLP.right(),
    TE_MLP.wrong("activation", "it computes gelu (tanh)", activation="gelu", precisions=("bf16", "fp8_current")),
    CLAMPED.right(),
    CLAMPED.wrong("operation", f"{CLAMP}the port does not clamp them", name="not clamped", limit=0.0),
    CLAMPED.wrong("operation", f"{CLAMP}they are clamped to at most 0.5", both=False),
    IN_PLACE.right(in_place=False),
    IN_PLACE.wrong("operation", f"{CLAMP}they are clamped between -0.75 and 0.75", in_place=False, limit=0.75),
    ONE_END.wrong(
        "operation",
        "clamp activations to at most 0.5, as the reference does; they are clamped between -0.5 and 0.5",
        both=True,
    ),
    WAVES.right(),
    WAVES.wrong("activation", f"1st 'linear' of embed reads {AS_IS}the port applies silu", before=True),
    WAVES.wrong("activation", f"1st 'linear' of out returns {AS_IS}the port applies silu", after=True),
    DEEP.wrong("bias-added-twice", "the port adds it twice in up.#.bias", twice=True),
)
