"""Steps of an optimizer that a reference writes out, as those of ``torch.optim`` that compute the same.

A weight is known by the gradient that is read of it. What changes it until the next one is read is a step, however it
is written; which optimizer makes such steps is told by ``optimizer_fit``. An edit of each step's last
call makes torch's optimizer step in its place, so that its settings can be changed like those of any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parity.diagnosis.training.optimizer_fit import Fitted, fitted
from parity.watching.optimizers import Stepped
from parity.watching.trace import Call, Edit, Trace, Value, edit, once_a_trace

_NEAR = 0.5  # of a weight's norm, by which its steps together move it at most
_ALIKE = 1e-12  # of a weight's norm, within which two values of it are the same


@dataclass
class _Weight:
    """The gradients that are read of one weight.

    Attributes:
        before: the weight as it is at each read.
        gradients: that are read.
        reads: the place of each read among the trace's calls.
    """

    before: list[Value] = field(default_factory=list)
    gradients: list[Value] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class ByHand:
    """Steps of a reference as an optimizer of ``torch.optim`` makes them.

    Attributes:
        stepped: the optimizer.
        edits: under which it makes them.
    """

    stepped: Stepped
    edits: tuple[Edit, ...]


@once_a_trace
def steps_by_hand(trace: Trace) -> list[ByHand]:
    """The optimizer of all weights that are stepped by one of its kind; none where ``torch.optim`` itself steps."""
    if trace.optimizers:
        return []
    found: list[tuple[Fitted, list[Edit]]] = []
    for weight in _weights(trace):
        last_calls = _last_calls(trace, weight)
        count = len(last_calls)
        if not count:
            continue
        tensors = [trace.tensor(value) for value in (*weight.before[:count], last_calls[-1].outputs[0])]
        gradients = [trace.tensor(value) for value in weight.gradients[:count]]
        made = fitted(tensors, gradients, _numbers(trace.calls[weight.reads[0] :]))
        if made is not None and (not found or made.kind is found[0][0].kind):
            found.append((made, [_edit(made, weight, call, step) for step, call in enumerate(last_calls, 1)]))
    if not found:
        return []
    first = found[0][0]
    stepped = Stepped(first.kind, [made.settings for made, _ in found], list(first.rates))
    return [ByHand(stepped, tuple(one for _, edits in found for one in edits))]


def _weights(trace: Trace) -> list[_Weight]:
    """Each weight with the last gradient that is read of it before it changes."""
    weights: list[_Weight] = []
    for place, call in enumerate(trace.calls):
        for before, gradient in _read(trace, call):
            x = trace.tensor(before)
            known = next((one for one in weights if _apart(trace.tensor(one.before[-1]), x) < _NEAR), None)
            if known is None:
                known = _Weight()
                weights.append(known)
            if known.before and _apart(trace.tensor(known.before[-1]), x) <= _ALIKE:
                known.gradients[-1], known.reads[-1] = gradient, place
            else:
                known.before.append(before)
                known.gradients.append(gradient)
                known.reads.append(place)
    return weights


def _read(trace: Trace, call: Call) -> Iterator[tuple[Value, Value]]:
    """The weights whose gradients a call gives, with these: ``p.grad``, or ``torch.autograd.grad(outputs, inputs)``."""
    if call.name != "grad" or not call.outputs:
        return
    of_all = call.kwargs.get("inputs", call.args[1] if len(call.args) > 1 else call.inputs)
    given = [leaf for leaf in tree_leaves(of_all) if isinstance(leaf, Value)]
    for weight, gradient in zip(given, call.outputs, strict=False):
        if trace.tensor(weight).shape == trace.tensor(gradient).shape:
            yield weight, gradient


def _last_calls(trace: Trace, weight: _Weight) -> list[Call]:
    """The call that ends each step; fewer than reads where no step follows the last."""
    calls: list[Call] = []
    ends = [*weight.reads[1:], len(trace.calls)]
    for step, (read, end) in enumerate(zip(weight.reads, ends, strict=True)):
        before = trace.tensor(weight.before[step])
        made = [call for call in trace.calls[read + 1 : end] if _may_step(trace, call, before)]
        after = trace.tensor(weight.before[step + 1]) if step + 1 < len(ends) else None
        if after is None and made:
            after = trace.tensor(made[-1].outputs[0])
        last = [call for call in made if after is not None and _apart(trace.tensor(call.outputs[0]), after) <= _ALIKE]
        if not last:
            break
        calls.append(last[0])
    return calls


def _may_step(trace: Trace, call: Call, before: Tensor) -> bool:
    """Whether what a call returns is the weight, moved."""
    return len(call.outputs) == 1 and _ALIKE < _apart(before, trace.tensor(call.outputs[0])) < _NEAR


def _apart(one: Tensor, other: Tensor) -> float:
    """Relative to the first; infinite where they cannot be one weight."""
    if one.shape != other.shape or not one.is_floating_point() or not other.is_floating_point():
        return float("inf")
    size = torch.linalg.vector_norm(one).item()
    return torch.linalg.vector_norm(one - other).item() / size if size > 0 else float("inf")


def _numbers(calls: Sequence[Call]) -> list[float]:
    leaves = (leaf for call in calls for leaf in tree_leaves((call.args, call.kwargs)))
    return list(dict.fromkeys(abs(leaf) for leaf in leaves if isinstance(leaf, float) and leaf == leaf))


def _edit(made: Fitted, weight: _Weight, call: Call, steps: int) -> Edit:
    """The call returns what the optimizer makes of the weight in so many steps, from its first value on."""
    in_place = call.name == "setitem" or (call.function.__name__.endswith("_") and call.outputs[0] not in call.inputs)

    def compute(was: Tensor, first: Tensor, *gradients: Tensor) -> Tensor:
        after = _stepped(made, first, gradients).to(was.dtype)
        if in_place:
            with torch.no_grad():
                return was.copy_(after)
        return was + (after - was).detach()

    return edit(call, (weight.before[0], *weight.gradients[:steps]), compute)


def _stepped(made: Fitted, first: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    parameter = first.detach().clone().requires_grad_()
    kind: Any = made.kind
    optimizer = kind([parameter])
    optimizer.param_groups[0].update(made.settings)
    for rate, gradient in zip(made.rates, gradients, strict=False):
        optimizer.param_groups[0]["lr"] = rate
        parameter.grad = gradient.detach().clone()
        optimizer.step()
    return parameter.detach()
