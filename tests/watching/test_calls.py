"""A trace follows values through writes into a part of their memory."""

import torch
from torch import nn

from parity.trace.calls import tracing


class Writer(nn.Module):
    """Makes a tensor of two halves, and uses it before and after the second is written."""

    def forward(self, x):
        made = torch.zeros(2 * len(x), dtype=x.dtype)
        made[: len(x)].copy_(x)
        before = made.cos()
        made[len(x) :] = x.sin()
        return before, made.cos()


def traced():
    x = torch.tensor([1.0, 2.0])
    with tracing(Writer()) as trace:
        Writer.forward(Writer(), x)
    return x, trace, [call for call in trace.calls if call.name == "cos"]


def test_a_tensor_is_another_value_once_a_part_of_it_is_written():
    x, trace, (before, after) = traced()
    assert before.inputs != after.inputs
    assert torch.equal(trace.tensor(before.inputs[0]), torch.cat((x, torch.zeros(2))))
    assert torch.equal(trace.tensor(after.inputs[0]), torch.cat((x, x.sin())))


def test_what_wrote_a_part_of_a_value_made_it_what_it_is():
    _, trace, (before, after) = traced()
    assert trace.producer(before.inputs[0]).name == "copy"
    assert trace.producer(after.inputs[0]).name == "setitem"


def test_a_part_that_was_not_written_stays_the_value_that_it_was():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])

    class Scaler(nn.Module):
        def forward(self, x):
            first, second = x.sin().chunk(2)
            first.mul_(2.0)
            return first.cos(), second.cos()

    module = Scaler()
    with tracing(module) as trace:
        module(x)
    chunk = next(call for call in trace.calls if call.name == "chunk")
    _, second = (call for call in trace.calls if call.name == "cos")
    assert second.inputs == [chunk.outputs[1]]
