"""One forward and backward pass, as named tensors."""

from collections import namedtuple

import torch
from torch import nn

from parity.passes.one_pass import positional_names
from parity.passes.one_pass import run as run_with_names


def ones_like_outputs(outputs):
    return {name: torch.ones_like(output) for name, output in outputs.items()}


def run(module, call, inputs, cotangents):
    return run_with_names(module, call, inputs, positional_names(module, call, inputs), cotangents)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.tensor(3.0))

    def forward(self, x, *, y, index=None):
        return x * self.used, {"sum": (x + y).sum(), "index": index}


def test_every_floating_point_output_input_and_parameter_is_named():
    inputs = {"x": torch.ones(3), "y": torch.ones(3), "index": torch.arange(3)}
    ran = run(TwoInputs(), None, inputs, ones_like_outputs)
    assert list(ran.outputs) == ["output[0]", "output[1]"]
    assert list(ran.input_gradients) == ["x", "y"]
    assert list(ran.weight_gradients) == ["used", "unused"]
    assert ran.weight_gradients["used"] == 3.0


def test_a_parameter_without_a_gradient_is_named_and_counts_as_zero():
    ran = run(TwoInputs(), None, {"x": torch.ones(3), "y": torch.ones(3)}, ones_like_outputs)
    assert ran.unreached == ("unused",)
    assert ran.weight_gradients["unused"] == 0.0


def test_gradients_of_an_earlier_pass_are_cleared():
    layer = nn.Linear(3, 2)
    first = run(layer, None, torch.ones(4, 3), ones_like_outputs)
    second = run(layer, None, torch.ones(4, 3), ones_like_outputs)
    assert torch.equal(first.weight_gradients["weight"], second.weight_gradients["weight"])


def test_the_caller_says_how_the_module_is_called_and_names_the_inputs():
    ran = run(
        nn.Linear(3, 2, bias=False),
        lambda module, x, scale: module(x) * scale,
        (torch.ones(1, 3), torch.tensor(2.0)),
        ones_like_outputs,
    )
    assert list(ran.input_gradients) == ["x", "scale"]


def test_the_users_tensors_are_left_alone():
    x = torch.ones(4, 3)
    run(nn.Linear(3, 2), None, x, ones_like_outputs)
    assert x.grad is None
    assert not x.requires_grad


def test_a_single_input_is_called_input_and_unnamed_ones_are_counted():
    layer = nn.Linear(3, 2)
    assert positional_names(layer, None, torch.ones(3)) == ("input",)
    assert positional_names(layer, lambda module, *rest: rest, (1, 2)) == ("input[0]", "input[1]")


def test_tensors_within_dicts_and_named_tuples_are_inputs_by_their_own_names():
    Rotary = namedtuple("Rotary", "cos sin")
    inputs = ({"x": torch.ones(3)}, Rotary(torch.ones(3), torch.ones(3)))
    ran = run(
        nn.Linear(3, 2),
        lambda module, tensors, rotary: module(tensors["x"] * rotary.cos + rotary.sin),
        inputs,
        ones_like_outputs,
    )
    assert list(ran.input_gradients) == ["tensors['x']", "rotary.cos", "rotary.sin"]
    assert not inputs[0]["x"].requires_grad
