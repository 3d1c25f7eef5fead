"""Two steps that follow each other in a reference, and ports that take them in the other order.

For example, a factor multiplies a layer's result with or without its bias; Mamba's gate comes before or after the norm;
a mean is subtracted before or after the division; an activation comes before or after a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.mistakes.activations import ACTIVATIONS, activations, biases
from parity.mistakes.alternatives import of_operands
from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.norms import norms
from parity.trace.trace import (
    CASTS,
    Call,
    Edit,
    Trace,
    Value,
    ancestors,
    back,
    binary,
    edit,
    grouped,
    unnumbered,
    users,
)

_SCALES = frozenset({"mul", "div"})
_SHIFTS = frozenset({"add", "sub", "bias"})
_SAME_ORDER = CASTS | {"view", "reshape", "flatten", "unflatten"}  # of elements, as into groups
_OF_A_NORM = 16  # a norm that is written out makes its result of up to so many values


@dataclass(frozen=True)
class Step:
    """A function of one activation, and of what else it is given.

    Attributes:
        call: returns the result, and computes nothing but what ``before`` can undo.
        x: the activation; None if no value of the trace is it, as before a bias inside a linear layer.
        kind: what the function is: ``mul``, ``norm``, ``bias``.
        described: names it in messages.
        needs: what ``before`` and ``compute`` are given.
        before: maps the result and the needs to the activation.
        compute: maps an activation and the needs to the result.
        operand: which one of two operands ``x`` is.
    """

    call: Call
    x: Value | None
    kind: str
    described: str
    needs: tuple[Value, ...]
    before: Callable[..., Tensor]
    compute: Callable[..., Tensor]
    operand: int = 0


@dataclass(frozen=True)
class _Pair:
    """``second`` reads what ``first`` returns, moved or not, after ``between``, steps that commute with it."""

    first: Step
    second: Step
    between: tuple[Step, ...]
    is_moved: bool

    def exchanged(self) -> Edit:
        """Return the edit under which the second comes first."""
        first, second, steps = self.first, self.second, (self.first, *self.between)
        x = second.x if second.x is not None else first.call.outputs[0]
        needs = [value for step in (second, *steps) for value in step.needs]

        def compute(was: Tensor, result: Tensor, x: Tensor, *needs: Tensor) -> Tensor:
            given = iter(needs)
            of_second, *of_steps = ([next(given) for _ in step.needs] for step in (second, *steps))
            before = first.before(result, *of_steps[0])
            y = second.compute(before.reshape(x.shape) if self.is_moved else before, *of_second)
            for step, of_step in zip(steps, of_steps, strict=True):
                shape = result.shape if step is first else was.shape
                y = step.compute(y.reshape(shape) if self.is_moved else y, *of_step)
            return (y.reshape(was.shape) if self.is_moved else y).to(was.dtype)

        return edit(second.call, (first.call.outputs[0], x, *needs), compute)


def step_order_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every two steps in the other order, in all layers, and for all experts of a loop, at once."""

    def kind(pair: _Pair) -> tuple[object, ...]:
        both = pair.first, pair.second
        return tuple((unnumbered(one.call.site[0]), one.kind, one.operand) for one in both)

    def place(pair: _Pair) -> tuple[object, ...]:
        return *kind(pair), pair.first.call.site[1:], pair.second.call.site[1:]

    found = list(_pairs(trace))
    alike, in_loops = (list(grouped(found, key).values()) for key in (place, kind))
    for pairs in (*alike, *(pairs for pairs in in_loops if pairs not in alike)):
        yield _exchanged(pairs)


def _pairs(trace: Trace) -> Iterator[_Pair]:
    """Yield two steps that do not commute, where only the second reads what the first returns."""
    found = list(_steps(trace))
    first_ones = (one for one in found if one.kind != "linear")  # its bias is a step of its own
    by_result = grouped(first_ones, lambda one: one.call.outputs[0].number)
    for second in found:
        if second.x is not None:
            for first, between, is_moved in _before(trace, second, second, by_result):
                if _fits(trace, first, second, is_moved or bool(between)):
                    yield _Pair(first, second, between, is_moved)


def _before(
    trace: Trace, second: Step, last: Step, by_result: Mapping[int, Sequence[Step]]
) -> Iterator[tuple[Step, tuple[Step, ...], bool]]:
    """Yield the steps before ``last`` that do not commute with the second, those in between, and whether it is moved.

    ``last`` is the second itself, or one before it that commutes with it.
    """
    if last.x is None:
        return
    is_moved = back(trace, last.x) != back(trace, last.x, _SAME_ORDER)
    for step in by_result.get(back(trace, last.x, _SAME_ORDER).number, ()):
        if not _is_read_by(trace, step, last):
            continue
        if not any({step.kind, second.kind} <= kinds for kinds in (_SCALES, _SHIFTS)):
            yield step, (), is_moved
        elif last is second:
            for first, between, was_moved in _before(trace, second, step, by_result):
                yield first, (*between, step), is_moved or was_moved


def _is_read_by(trace: Trace, step: Step, last: Step) -> bool:
    """Return whether nothing else reads a step's result; several calls of a norm that is written out may."""
    sites = {call.site for call, _ in users(trace, step.call.outputs[0], _SAME_ORDER)}
    inside = {last.call.site}
    if last.kind == "norm" and len(sites) > 1:
        made = map(trace.producer, ancestors(trace, last.call.outputs[0], _OF_A_NORM))
        inside |= {call.site for call in made if call is not None}
    return sites <= inside


def _fits(trace: Trace, first: Step, second: Step, is_far: bool) -> bool:
    """Return whether the first can be computed from what the second returns, and keeps its shape."""
    before, result = (trace.tensor(one.call.outputs[0]).shape for one in (first, second))
    if before == result:
        return True
    if is_far:  # the calls in between keep the elements' order
        return before.numel() == result.numel() and "linear" not in (first.kind, second.kind)
    others = [trace.tensor(value).shape for value in first.needs if value != first.x]
    try:
        return first.kind in _SCALES and all(torch.broadcast_shapes(shape, result) == result for shape in others)
    except RuntimeError:  # they do not broadcast
        return False


def _exchanged(pairs: Sequence[_Pair]) -> Hypothesis:
    others = f", and so for {len(pairs) - 1} more like it" if len(pairs) > 1 else ""
    order = f"{pairs[0].first.described} before {pairs[0].second.described}"
    return Hypothesis(
        "operation",
        f"not {order}{others}",
        f"take {order}, as the reference does{others}; they are in the other order",
        tuple(pair.exchanged() for pair in pairs),
        scope="call",
    )


def _steps(trace: Trace) -> Iterator[Step]:
    """Yield norms, activations, biases, linear layers with a bias, and functions of two operands, in no order."""
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
    """Yield a sum, product, difference or quotient as a function of each operand that has its shape."""
    match binary(call):
        case (("add" | "sub" | "mul" | "div") as kind, left, right):
            pass
        case _:
            return
    shape = trace.tensor(call.outputs[0]).shape
    described = f"the {call.described}"
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
    """Return the function with another tensor in the place of one operand."""

    def computed(x: Tensor, *two: Tensor) -> Tensor:
        result: Tensor = getattr(torch, kind)(*(x if i == position else one for i, one in enumerate(two)))
        return result

    return of_operands(call, computed)
