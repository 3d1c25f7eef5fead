"""Single calls that a port computes otherwise are told by what they are, where no mistake with a meaning explains."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

HIDDEN = 64


class Modulated(nn.Module):
    """A linear layer between a shift, a scale and a gate that a condition makes, as in a diffusion transformer."""

    def __init__(self, linear, order=(0, 1, 2), one: float = 1.0) -> None:
        super().__init__()
        self.modulation, self.linear = linear(HIDDEN, 3 * HIDDEN), linear(HIDDEN, HIDDEN)
        self.order, self.one = order, one

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(F.silu(condition))[:, None].chunk(3, -1)
        shift, scale, gate = (parts[i] for i in self.order)
        return x + gate * self.linear(x * (self.one + scale) + shift)


class Timed(nn.Module):
    """Sines and cosines of a time."""

    def __init__(self, linear, halves: bool = True, cosines_first: bool = True, steps: int = 32) -> None:
        super().__init__()
        self.linear = linear(HIDDEN, HIDDEN)
        self.halves, self.cosines_first, self.steps = halves, cosines_first, steps

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(1000.0) * torch.arange(32, device=x.device).to(times.dtype) / self.steps)
        angles = times[:, :1] * frequencies
        parts = (angles.cos(), angles.sin()) if self.cosines_first else (angles.sin(), angles.cos())
        embedded = torch.cat(parts, -1) if self.halves else torch.stack(parts, -1).flatten(1)
        return self.linear(x + embedded[:, None].to(x.dtype))


class Pooled(nn.Module):
    """The first token of a sequence."""

    def __init__(self, linear, place: int = 0, mean: bool = False) -> None:
        super().__init__()
        self.linear, self.place, self.mean = linear(HIDDEN, HIDDEN), place, mean

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.linear(x.mean(1) if self.mean else x[:, self.place])


def found(module, precision="fp32", **port):
    def factory(te, **_):
        right = module(nn.Linear)
        return parity.Pair(
            reference=right,
            candidate=module(te.Linear, **port),
            inputs=lambda rng, batch: (rng.normal(batch, 24, HIDDEN), rng.normal(batch, HIDDEN)),
            weights={name: name for name, _ in right.named_parameters()},
        )

    (result,) = parity.compare(parity.Case("operations", factory, sizes=(dict(batch=4),)), [precision])
    return [(finding.title, finding.message) for finding in result.findings] or [(result.status, "")]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("module", "port", "told"),
    [
        (Modulated, dict(order=(1, 0, 2)), "its parts are in the order 2, 1, 3"),
        (Modulated, dict(order=(2, 0, 1)), "its parts are in the order 3, 1, 2"),
        (Modulated, dict(one=0.0), "1st 'add' of the module"),
        (Timed, dict(cosines_first=False), "its parts are in the order 2, 1"),
        (Pooled, dict(place=-1), "it takes the last of dimension 1"),
        (Pooled, dict(mean=True), "it is the mean over dimension 1"),
    ],
)
def test_the_call_and_what_is_wrong_with_it_are_told(module, port, told, precision):
    title, message = found(module, precision, **port)[0]
    assert title == "operation"
    assert told in message


@pytest.mark.parametrize("module", [Modulated, Timed, Pooled])
def test_right_ports_have_none_to_tell(module):
    assert found(module) == [("passed", "")]


class Leaky(nn.Module):
    """An activation with a number of its own."""

    def __init__(self, linear, slope: float = 0.2) -> None:
        super().__init__()
        self.up, self.down, self.slope = linear(HIDDEN, HIDDEN), linear(HIDDEN, HIDDEN), slope

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.down(F.leaky_relu(self.up(x), self.slope))


class Shifted(nn.Module):
    """A product of neighbours in windows that are shifted by half of one, as Swin's."""

    def __init__(self, linear, shift: int = 4) -> None:
        super().__init__()
        self.linear, self.shift = linear(HIDDEN, HIDDEN), shift

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        y = x.roll(-self.shift, 1) if self.shift else x
        y = self.linear(y.unflatten(1, (-1, 8)).cumsum(2)).flatten(1, 2)
        return x + (y.roll(self.shift, 1) if self.shift else y)


class Averaged(nn.Module):
    """The mean over a sequence."""

    def __init__(self, linear, place: int | None = None) -> None:
        super().__init__()
        self.linear, self.place = linear(HIDDEN, HIDDEN), place

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        y = self.linear(x)
        return y.mean(1) if self.place is None else y[:, self.place]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("module", "port", "told"),
    [
        (
            Leaky,
            dict(slope=0.05),
            "the 1st 'leaky_relu' of the module as the reference does; its negative_slope is 0.05",
        ),
        (Leaky, dict(slope=0.0), "the 1st 'leaky_relu' of the module as the reference does; it is relu"),
        (
            Shifted,
            dict(shift=0),
            "the 1st 'roll' of the module and of 1 more like it as the reference does; it is left",
        ),
        (
            Averaged,
            dict(place=0),
            "the 1st 'mean' of the module as the reference does; it takes the first of dimension",
        ),
        (
            Averaged,
            dict(place=-1),
            "the 1st 'mean' of the module as the reference does; it takes the last of dimension",
        ),
    ],
)
def test_a_number_a_shift_and_a_mean_that_are_others_are_told(module, port, told, precision):
    title, message = found(module, precision, **port)[0]
    assert title == "operation"
    assert told in message


@pytest.mark.parametrize("module", [Leaky, Shifted, Averaged])
def test_right_ports_of_these_have_none_to_tell(module):
    assert found(module) == [("passed", "")]


class Whitened(nn.Module):
    """A series less its mean, over its deviation, without its first steps."""

    def __init__(self, linear, unbiased: bool = False, first: int = 4) -> None:
        super().__init__()
        self.linear, self.unbiased, self.first = linear(HIDDEN, HIDDEN), unbiased, first

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        deviation = (x.float().var(1, keepdim=True, unbiased=self.unbiased) + 1e-5).sqrt()
        y = self.linear(((x.float() - x.float().mean(1, keepdim=True)) / deviation).to(x.dtype))
        return y[:, 4:] if self.first == 4 else y[:, self.first : self.first + 20]


@pytest.mark.parametrize(
    ("port", "told"),
    [
        (dict(unbiased=True), "the 1st 'var' of the module as the reference does; it divides by 23, not 24 elements"),
        (dict(first=1), "it takes 20 of dimension 1 from the second on"),
    ],
)
def test_a_variance_of_another_count_and_steps_from_another_one_on_are_told(port, told):
    title, message = found(Whitened, **port)[0]
    assert title == "operation"
    assert told in message


def test_a_right_port_of_whitened_series_has_none_to_tell():
    assert found(Whitened) == [("passed", "")]
