"""Biases and dropout in a trace, and what ports get wrong about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import Mistake, everywhere_and_somewhere
from parity.diagnosis.walk import binary
from parity.watching.trace import Call, Edit, Trace, Value, edit


@dataclass(frozen=True, eq=False)
class Bias:
    """A sum of something and a parameter of one dimension, by itself or inside a linear layer.

    Attributes:
        call: returns the sum.
        bias: the parameter.
        name: of the parameter.
    """

    call: Call
    bias: Value
    name: str

    def edits(self, times: float) -> tuple[Edit, ...]:
        """The bias is to be added so many times."""
        return (edit(self.call, (self.bias,), lambda was, bias: was + (times - 1) * bias.to(was.dtype)),)

    def without_third(self, trace: Trace, third: int) -> tuple[Edit, ...]:
        """Of a fused layer, whose outputs are thrice as many as its inputs, a third's bias is to be left out."""
        width = trace.tensor(self.bias).shape[0] // 3
        if self.call.name == "add" or trace.tensor(self.call.inputs[self.call.name == "addmm"]).shape[-1] != width:
            return ()

        def compute(was: Tensor, bias: Tensor) -> Tensor:
            left_out = torch.zeros_like(bias)
            left_out[third * width : (third + 1) * width] = bias[third * width : (third + 1) * width]
            return was - left_out.to(was.dtype)

        return (edit(self.call, (self.bias,), compute),)


def biases(trace: Trace) -> list[Bias]:
    """Every bias of a linear layer, in order."""
    found = []
    for call in trace.calls:
        named = binary(call)
        if call.name == "linear" and call.outputs:
            given = [*call.args[2:], *call.kwargs.values()]
        elif call.name == "addmm":
            given = [call.args[0]]
        elif named is not None and named[0] == "add":
            given = list(named[1:])
        else:
            continue
        for value in given:
            name = trace.parameter(value)
            if name is not None and trace.tensor(value).dim() == 1:
                found.append(Bias(call, value, name))
    return found


def bias_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with the reference's biases."""
    mistakes: list[Mistake[Bias]] = [
        Mistake("bias-dropped", "bias missing", "add the bias; it is left out", lambda one: one.edits(0.0)),
        Mistake("bias-added-twice", "bias twice", "add the bias once; it is added twice", lambda one: one.edits(2.0)),
    ]
    for third, part in enumerate(("first", "second", "last")):
        mistakes.append(
            Mistake(
                "bias-dropped",
                f"{part} third of the bias missing",
                f"add the whole bias of the fused layer; its {part} third (Q, K and V one after the other) is left out",
                lambda one, third=third: one.without_third(trace, third),  # type: ignore[misc]
            )
        )
    yield from everywhere_and_somewhere(mistakes, biases(trace), module, lambda one: one.name)
