"""Recognise steps of an optimizer that a module writes out, and fit their settings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from parity.trace.trace import Call, Edit, Stepped, Trace, Value, edit, once_a_trace, settings_of

# Find the optimizer of ``torch.optim`` that makes given steps, from the gradients and the weights
# before and after each.
#
# How the code of the steps is written does not matter. In FP64 a step of the right optimizer is exact: its learning
# rate and decay follow by least squares from any one step; betas, eps and momentum are among the numbers in the code.


_EXACT = 1e-6  # a step is the optimizer's if it deviates by no more than this share of its norm
_MOST_NUMBERS = 12
_MOST_ELEMENTS = 4096
_USUAL_BETAS = (0.9, 0.999)
_USUAL_EPS = 1e-8

Directions = list[tuple[Tensor, Tensor]]  # where each step goes by learning rate, and by learning rate times decay


@dataclass(frozen=True)
class Fitted:
    """An optimizer that makes the steps of a weight.

    Attributes:
        kind: its class.
        settings: those of the weight's parameter group, with the first step's learning rate.
        rates: the learning rate of each step.
    """

    kind: type[Optimizer]
    settings: dict[str, Any]
    rates: tuple[float, ...]


def fitted(weights: Sequence[Tensor], gradients: Sequence[Tensor], numbers: Sequence[float]) -> Fitted | None:
    """Return the optimizer, if it is an Adam, AdamW or SGD, that makes these steps.

    Args:
        weights: the weight before each step and after the last, FP64.
        gradients: the gradient of each step.
        numbers: the numbers in the code.
    """
    ps, gs = ([x.detach().double().flatten()[:_MOST_ELEMENTS] for x in some] for some in (weights, gradients))
    for kind, settings, directions in _candidates(ps, gs, numbers):
        found = _rates_and_decay(ps, directions())
        if found is None:
            continue
        rates, decay = found
        if decay and "weight_decay" in settings:  # it would decay twice, in two ways
            continue
        made: Optimizer = kind([torch.zeros(1)], **{"lr": rates[0], "weight_decay": decay, **settings})
        return Fitted(kind, settings_of(made.param_groups[0]), rates)
    return None


def _candidates(
    ps: Sequence[Tensor], gs: Sequence[Tensor], numbers: Sequence[float]
) -> Iterator[tuple[Any, dict[str, Any], Callable[[], Directions]]]:
    """Yield classes with the settings that least squares do not give, and the steps' directions under them."""
    fractions = [x for x in _few([*numbers, *(1.0 - x for x in numbers)]) if 0.0 < x < 1.0]
    for momentum, nesterov in ((0.0, False), *itertools.product(fractions, (False, True))):
        yield SGD, dict(momentum=momentum, nesterov=nesterov), partial(_of_sgd, ps, gs, momentum, nesterov)
    betas = [x for x in fractions if x >= 0.5]
    pairs = [pair for pair in itertools.product(betas, betas) if len(gs) > 1] or [_USUAL_BETAS]
    small = [*(x for x in _few(numbers) if 0.0 < x <= 1e-2), _USUAL_EPS]
    small = list(dict.fromkeys(small))
    added = {decay: [g + decay * p for g, p in zip(gs, ps, strict=False)] for decay in _few(numbers) if decay <= 1.0}
    for eps in small:
        for pair in pairs if _is_first_step(ps, gs, eps) else ():
            yield AdamW, dict(betas=pair, eps=eps), partial(_of_adam, ps, gs, pair, eps)
    for (decay, sums), eps in itertools.product(added.items(), small):
        for pair in pairs if _is_first_step(ps, sums, eps) else ():
            yield Adam, dict(betas=pair, eps=eps, weight_decay=decay), partial(_of_adam, ps, sums, pair, eps)


def _is_first_step(ps: Sequence[Tensor], gs: Sequence[Tensor], eps: float) -> bool:
    """Return whether the first step is Adam's; betas do not change it."""
    return _rates_and_decay(ps[:2], _of_adam(ps[:1], gs[:1], _USUAL_BETAS, eps)) is not None


def _few(numbers: Sequence[float]) -> list[float]:
    """Return each number once, rounded so that 1 - 0.9 is 0.1."""
    return list(dict.fromkeys(float(f"{number:.9g}") for number in numbers))[:_MOST_NUMBERS]


def _of_sgd(ps: Sequence[Tensor], gs: Sequence[Tensor], momentum: float, nesterov: bool) -> Directions:
    found, buffers = [], [torch.zeros_like(gs[0]), torch.zeros_like(gs[0])]
    for p, g in zip(ps, gs, strict=False):
        buffers = [momentum * buffer + x for buffer, x in zip(buffers, (g, p), strict=True)]
        of_gradient, of_decay = buffers
        found.append((g + momentum * of_gradient, p + momentum * of_decay) if nesterov else (of_gradient, of_decay))
    return found


def _of_adam(ps: Sequence[Tensor], gs: Sequence[Tensor], betas: tuple[float, float], eps: float) -> Directions:
    found, mean, square = [], torch.zeros_like(gs[0]), torch.zeros_like(gs[0])
    for number, (p, g) in enumerate(zip(ps, gs, strict=False), 1):
        mean = betas[0] * mean + (1.0 - betas[0]) * g
        square = betas[1] * square + (1.0 - betas[1]) * g.square()
        root = (square / (1.0 - betas[1] ** number)).sqrt() + eps
        found.append((mean / (1.0 - betas[0] ** number) / root, p))
    return found


def _rates_and_decay(ps: Sequence[Tensor], directions: Directions) -> tuple[tuple[float, ...], float] | None:
    """Return the learning rates and the decay of steps along these directions; None if they do not fit,
    or decays differ.
    """
    rates, decays = [], []
    for (before, after), pair in zip(itertools.pairwise(ps), directions, strict=True):
        step, along = before - after, torch.stack(pair, 1)
        if not bool(along.isfinite().all()) or not step.any():
            return None
        sizes = torch.linalg.vector_norm(along, dim=0)
        if not sizes.all():
            return None
        solved = torch.linalg.lstsq(along / sizes, step[:, None], driver="gelsd").solution[:, 0]
        size = torch.linalg.vector_norm(step)
        if torch.linalg.vector_norm(step - along / sizes @ solved) > _EXACT * size:
            return None
        rate, decayed = (solved / sizes).tolist()
        if rate <= 0.0:
            return None
        rates.append(rate)
        decays.append(decayed / rate if abs(solved[1]) > _EXACT * size else 0.0)
    same = all(math.isclose(decay, decays[0], rel_tol=1e-3) for decay in decays)
    return (tuple(map(_plain, rates)), _plain(decays[0])) if same and decays[0] >= 0.0 else None


def _plain(number: float) -> float:
    """Return the number as people write it, without what least squares leave behind."""
    return float(f"{number:.5g}")


# Optimizer steps that a reference writes out, as steps of the optimizer of ``torch.optim`` that computes the same.
#
# A weight is recognised when its gradient is read. What changes it until the next gradient is read is a step, however
# it is written; the fit above tells which optimizer makes such steps. An edit of each step's last call makes torch's
# optimizer step in its place, so that its settings can be changed like those of any other.


_NEAR = 0.5  # a weight's steps together move it by no more than this share of its norm
_ALIKE = 1e-12  # two values of a weight are the same if they differ by no more than this share of its norm


@dataclass
class _Weight:
    """The gradients that are read of one weight.

    Attributes:
        before: the weight as it is at each read.
        gradients: the gradients that are read.
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
        edits: the edits under which it makes them.
    """

    stepped: Stepped
    edits: tuple[Edit, ...]


@once_a_trace
def steps_by_hand(trace: Trace) -> list[ByHand]:
    """Return the optimizer of all weights that one kind of optimizer steps; none if ``torch.optim`` itself steps."""
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
    """Return each weight with the last gradient that is read of it before each change."""
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
    """Yield each weight and its gradient, as ``p.grad`` or ``torch.autograd.grad(outputs, inputs)`` gives them."""
    if call.name != "grad" or not call.outputs:
        return
    of_all = call.kwargs.get("inputs", call.args[1] if len(call.args) > 1 else call.inputs)
    given = [leaf for leaf in tree_leaves(of_all) if isinstance(leaf, Value)]
    for weight, gradient in zip(given, call.outputs, strict=False):
        if trace.tensor(weight).shape == trace.tensor(gradient).shape:
            yield weight, gradient


def _last_calls(trace: Trace, weight: _Weight) -> list[Call]:
    """Return the call that ends each step: fewer than there are reads, if no step follows the last one."""
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
    """Return whether what a call returns is the weight, moved."""
    return len(call.outputs) == 1 and _ALIKE < _apart(before, trace.tensor(call.outputs[0])) < _NEAR


def _apart(one: Tensor, other: Tensor) -> float:
    """Return the distance relative to the first; infinite if the two cannot be one weight."""
    if one.shape != other.shape or not one.is_floating_point() or not other.is_floating_point():
        return float("inf")
    size = torch.linalg.vector_norm(one).item()
    return torch.linalg.vector_norm(one - other).item() / size if size > 0 else float("inf")


def _numbers(calls: Sequence[Call]) -> list[float]:
    leaves = (leaf for call in calls for leaf in tree_leaves((call.args, call.kwargs)))
    return list(dict.fromkeys(abs(leaf) for leaf in leaves if isinstance(leaf, float) and leaf == leaf))


def _edit(made: Fitted, weight: _Weight, call: Call, steps: int) -> Edit:
    """Return the edit by which a call returns what the optimizer makes of the weight's first value in so many steps."""
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
