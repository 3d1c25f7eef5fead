"""Values beside kinks: where they are moved to, and what that changes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parity
from parity.numerics.formats import Rounding
from parity.numerics.freedom import FUSED, WIDTH, Kinks
from parity.numerics.rounding import rounded

NOISE = 0.01
FP32 = Rounding(torch.float32)


def gradients(function, x, kinks):
    moved = x.clone().requires_grad_()
    with rounded(FP32, (), FUSED, kinks=kinks) as phase:
        y = function(moved)
        phase.begin_backward()
        y.sum().backward()
    return y.detach(), moved.grad


FUNCTIONS = {
    "relu": (F.relu, [0.0]),
    "relu_in_place": (lambda x: F.relu_(1.0 * x), [0.0]),
    "threshold": (lambda x: F.threshold(x, 0.5, 0.0), [0.5]),
    "leaky_relu": (F.leaky_relu, [0.0]),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), [-0.5, 0.5]),
    "clamp_to_tensors": (lambda x: x.clamp(torch.tensor(-0.5), torch.tensor(0.5)), [-0.5, 0.5]),
    "hardtanh": (F.hardtanh, [-1.0, 1.0]),
    "relu6": (F.relu6, [0.0, 6.0]),
    "hardswish": (F.hardswish, [-3.0, 3.0]),
    "hardsigmoid": (F.hardsigmoid, [-3.0, 3.0]),
    "softshrink": (lambda x: F.softshrink(x, 0.5), [-0.5, 0.5]),
    "abs": (torch.abs, [0.0]),
    "maximum": (lambda x: torch.maximum(x, 0.25 - x), [0.125]),
    "minimum": (lambda x: torch.minimum(x, 0.25 - x), [0.125]),
    "where": (lambda x: torch.where(x > 0.5, x, 0.1 * x + 0.45), [0.5]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("side", [1.0, -1.0])
def test_a_value_nearer_to_a_kink_than_its_error_has_the_gradient_of_the_other_side(name, side):
    function, kinks = FUNCTIONS[name]
    offsets = torch.tensor([-0.4, -0.02, 0.02, 0.4]) * 0.5
    x = (torch.tensor(kinks)[:, None] + offsets).flatten()
    noted = Kinks()
    gradients(function, x - NOISE, noted)
    _, moved = gradients(function, x, Kinks(side, noted.values))
    _, beyond = gradients(function, x + side * 0.02, None)
    torch.testing.assert_close(moved, beyond, atol=0.02, rtol=0.0)
    _, still = gradients(function, x, None)
    assert ((moved - still).abs() > 0.05).sum() == len(kinks)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "where"])
def test_what_a_function_returns_stays_where_it_is(name):
    function, kinks = FUNCTIONS[name]
    x = torch.tensor(kinks) + 1e-3
    noted = Kinks()
    gradients(function, x - NOISE, noted)
    assert torch.equal(gradients(function, x, Kinks(1.0, noted.values))[0], function(x))


@pytest.mark.parametrize("function", [lambda x: x.amax(1), lambda x: x.max(1).values, lambda x: x.amax(1, True)])
def test_the_next_to_the_largest_is_chosen_where_it_is_as_near(function):
    x = torch.tensor([[1.0, 0.98, 0.5], [1.0, 0.5, 0.4]])
    noted = Kinks()
    gradients(function, x - NOISE, noted)
    y, moved = gradients(function, x, Kinks(1.0, noted.values))
    assert moved.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    torch.testing.assert_close(y.flatten(), torch.tensor([0.98, 1.0]))


def test_numbers_that_are_larger_than_most_may_be_farther_off():
    """The largest of many are: they are ten times as large as usual here, and so is what is lost of them."""
    x = torch.cat([torch.ones(2, 998), torch.tensor([[10.2, 10.0], [1.2, 1.0]])], 1)
    noted = Kinks()
    gradients(lambda x: x.amax(1), x - NOISE, noted)
    _, moved = gradients(lambda x: x.amax(1), x, Kinks(1.0, noted.values))
    assert moved[:, -2:].tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_the_largest_of_truths_is_left_alone():
    x = torch.tensor([[1.0, -1.0]])

    def function(x):
        return x * (x > 0).amax(1, keepdim=True)

    noted = Kinks()
    gradients(function, x - NOISE, noted)
    assert torch.equal(gradients(function, x, Kinks(1.0, noted.values))[0], x)


def test_each_call_has_the_error_that_is_measured_there():
    """A coarse tensor and a fine one, both 0.02 below 0: the coarse one's values may be above."""
    x = torch.full((2, 64), -0.02)

    def function(x):
        coarse, fine = x.unbind(0)
        return F.relu(coarse) + F.relu(fine)

    noted = Kinks()
    gradients(function, x + torch.tensor([[NOISE], [1e-4]]), noted)
    _, moved = gradients(function, x, Kinks(1.0, noted.values))
    assert 1e-4 * WIDTH < 0.02 < NOISE * WIDTH
    assert moved.tolist() == [[1.0] * 64, [0.0] * 64]


class Kinked(nn.Module):
    """Two linear layers with a kinked function after each."""

    def __init__(self, linear, function):
        super().__init__()
        self.first, self.second, self.function = linear(128, 256), linear(256, 128), function

    def forward(self, x):
        return self.function(self.second(self.function(self.first(x))))


def kinked(function, scale=1.0):
    def factory(te, **_):
        reference = Kinked(nn.Linear, function)
        return parity.Pair(
            reference,
            Kinked(te.Linear, function),
            weights={name: name for name, _ in reference.named_parameters()},
            inputs=lambda rng, batch: rng.normal(batch, 64, 128),
            call_candidate=lambda module, x: scale * module(x),
        )

    return parity.Case("kinked", factory, sizes=(dict(batch=4),))


@pytest.mark.parametrize("name", ["clamp", "hardtanh", "hardswish", "softshrink", "abs", "maximum"])
def test_right_ports_with_kinks_pass(name):
    results = parity.compare(kinked(FUNCTIONS[name][0]), ["fp32", "bf16", "fp16"], seeds=range(2))
    assert {result.status for result in results} == {"passed"}


@pytest.mark.parametrize("name", ["clamp", "abs"])
def test_a_wrong_factor_is_told_in_spite_of_kinks(name):
    (result,) = parity.compare(kinked(FUNCTIONS[name][0], scale=1.001), ["fp16"])
    assert result.status == "failed"


def test_another_bound_of_a_clamp_is_told():
    def factory(te, **_):
        modules = [Kinked(kind, lambda x, b=b: x.clamp(-b, b)) for kind, b in ((nn.Linear, 0.5), (te.Linear, 0.501))]
        return parity.Pair(
            *modules,
            weights={name: name for name, _ in modules[0].named_parameters()},
            inputs=lambda rng, batch: rng.normal(batch, 64, 128),
        )

    (result,) = parity.compare(parity.Case("clamped", factory, sizes=(dict(batch=4),)), ["fp16"])
    assert result.status == "failed"
