"""Two steps that follow each other in a reference, and ports that take them in the other order.

A factor multiplies a layer's result with its bias, or without; Mamba's gate comes before the norm, or after it; a mean
is subtracted before the division, or after; an activation comes before a norm, or after it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parity.diagnosis.functions.activations import ACTIVATIONS, activations
from parity.diagnosis.functions.again import of_operands
from parity.diagnosis.functions.linears import biases
from parity.diagnosis.functions.operations import ordinal
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.norms.norms import norms
from parity.diagnosis.walk import back, binary, users
from parity.watching.trace import Call, Edit, Trace, Value, edit

_NUMBER = re.compile(r"\d+")
_SCALES = frozenset({"mul", "div"})
_SHIFTS = frozenset({"add", "sub", "bias"})


@dataclass(frozen=True)
class Step:
    """A function of one activation, and of others that it is given besides.

    Attributes:
        call: returns the result, and computes nothing else but what ``before`` can undo.
        x: the activation; None where no value of the trace is it, as of a bias inside a linear layer.
        kind: of the function: ``mul``, ``norm``, ``bias``.
        described: for messages.
        needs: what ``before`` and ``compute`` are given.
        before: from the result and the needs to the activation.
        compute: from an activation and the needs to the result.
        operand: which one of two ``x`` is.
    """

    call: Call
    x: Value | None
    kind: str
    described: str
    needs: tuple[Value, ...]
    before: Callable[..., Tensor]
    compute: Callable[..., Tensor]
    operand: int = 0


def step_order_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Every two steps in the other order; those of all layers, and of all experts in a loop, at once."""
    alike: dict[tuple[object, ...], list[tuple[Step, Step]]] = defaultdict(list)
    loops: dict[tuple[object, ...], list[tuple[Step, Step]]] = defaultdict(list)
    for pair in _pairs(trace):
        paths = tuple(_NUMBER.sub("#", one.call.site[0]) for one in pair)
        kinds = tuple((one.kind, one.operand) for one in pair)
        alike[(paths, kinds, tuple(one.call.site[1:] for one in pair))].append(pair)
        loops[(paths, kinds)].append(pair)
    groups = list(alike.values())
    for pairs in (*groups, *(pairs for pairs in loops.values() if pairs not in groups)):
        yield _exchanged(trace, pairs, module)


def _pairs(trace: Trace) -> Iterator[tuple[Step, Step]]:
    """Steps of which the second alone reads what the first returns, and which do not commute."""
    found = list(_steps(trace))
    by_result: dict[int, list[Step]] = defaultdict(list)
    for one in (one for one in found if one.kind != "linear"):  # its bias is a step of its own
        by_result[one.call.outputs[0].number].append(one)
    for second in found:
        if second.x is None:
            continue
        for first in by_result.get(back(trace, second.x).number, ()):
            sites = {call.site for call, _ in users(trace, first.call.outputs[0])}
            commute = any({first.kind, second.kind} <= kinds for kinds in (_SCALES, _SHIFTS))
            if not commute and sites == {second.call.site} and _fits(trace, first, second):
                yield first, second


def _fits(trace: Trace, first: Step, second: Step) -> bool:
    """Whether the first can be computed of what the second returns, and keeps its shape."""
    result = trace.tensor(second.call.outputs[0]).shape
    if trace.tensor(first.call.outputs[0]).shape == result:
        return True
    others = [trace.tensor(value).shape for value in first.needs if value != first.x]
    try:
        return first.kind in _SCALES and all(torch.broadcast_shapes(shape, result) == result for shape in others)
    except RuntimeError:  # they do not broadcast
        return False


def _exchanged(trace: Trace, pairs: Sequence[tuple[Step, Step]], module: nn.Module) -> Hypothesis:
    first, second = pairs[0]
    others = f", and so for {len(pairs) - 1} more like it" if len(pairs) > 1 else ""
    order = f"{first.described} before {second.described}"
    return Hypothesis(
        "operation",
        f"not {order}{others}",
        f"take {order}, as the reference does{others}; they are in the other order",
        module,
        tuple(_in_other_order(*pair) for pair in pairs),
        scope="call",
    )


def _in_other_order(first: Step, second: Step) -> Edit:
    count = len(first.needs)

    def compute(was: Tensor, result: Tensor, *needs: Tensor) -> Tensor:
        of_first, of_second = needs[:count], needs[count:]
        x = first.before(result, *of_first)
        return first.compute(second.compute(x, *of_second), *of_first).to(was.dtype)

    return edit(second.call, (first.call.outputs[0], *first.needs, *second.needs), compute)


def _steps(trace: Trace) -> Iterator[Step]:
    """Norms, activations, biases and linear layers with them, and functions of two operands, in no order."""
    inside: set[int] = set()
    for norm in norms(trace):
        inside.add(norm.call.outputs[0].number)
        yield Step(
            *(norm.call, norm.x, "norm", f"the norm of {norm.call.module}", norm.needs),
            lambda result, x, *affine: x,
            lambda x, was, *affine, norm=norm: norm.compute(x, *affine),
        )
    for activation in activations(trace):
        inside.add(activation.call.outputs[0].number)
        yield Step(
            *(activation.call, activation.x, "activation", f"the {activation.name} of {activation.call.module}"),
            (activation.x,),
            lambda result, x: x,
            lambda x, was, name=activation.name: ACTIVATIONS[name](x),
        )
    for bias in biases(trace):
        if bias.call.name in ("linear", "addmm"):
            yield Step(
                *(bias.call, None, "bias", bias.name, (bias.bias,)),
                lambda result, bias: result - bias,
                lambda x, bias: x + bias,
            )
            if bias.call.name == "linear":
                yield _linear(bias.call, bias.name)
    for call in trace.calls:
        if len(call.outputs) == 1 and call.outputs[0].number not in inside:
            yield from _of_two(trace, call)


def _linear(call: Call, name: str) -> Step:
    x, *parameters = call.inputs
    return Step(
        *(call, x, "linear", f"the layer of {name}", (x, *parameters)),
        lambda result, x, *parameters: x,
        lambda x, was, *parameters: torch.nn.functional.linear(x, *parameters),
    )


def _of_two(trace: Trace, call: Call) -> Iterator[Step]:
    """A sum, a product, a difference or a quotient, as a function of each operand that has its shape."""
    match binary(call):
        case (("add" | "sub" | "mul" | "div") as kind, left, right):
            pass
        case _:
            return
    shape = trace.tensor(call.outputs[0]).shape
    described = f"the {ordinal(call.site[3] + 1)} {call.name!r} of {call.module}"
    for position, x in enumerate((left, right)):
        is_activation = isinstance(x, Value) and trace.parameter(x) is None and x not in call.outputs
        if not is_activation or len(shape) < 2 or trace.tensor(x).shape != shape:
            continue
        if trace.tensor(x).is_floating_point() and (position == 0 or kind != "div"):
            yield Step(
                *(call, x, kind, described, tuple(call.inputs)),
                of_operands(call, lambda was, *two, position=position: two[position]),
                _with_another(call, kind, position),
                position,
            )


def _with_another(call: Call, kind: str, position: int) -> Callable[..., Tensor]:
    """The function with another tensor in the place of one operand."""
    functions: dict[str, Callable[..., Tensor]] = {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "div": torch.div,
    }

    def computed(x: Tensor, *two: Tensor) -> Tensor:
        result: Tensor = functions[kind](*(x if i == position else one for i, one in enumerate(two)))
        return result

    return of_operands(call, computed)
