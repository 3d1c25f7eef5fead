"""Log-probabilities of given tokens: recognised in a trace, and what a trainer or its engine gets wrong about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.mistakes.constants import TEMPERATURES, numbers
from parity.mistakes.hypothesis import Hypothesis, Mistake, everywhere_and_somewhere
from parity.mistakes.losses import CrossEntropy, cross_entropies
from parity.trace.trace import RESHAPES, Call, Edit, Trace, Value, back, chain, edit

_TAKEN = RESHAPES | {"getitem", "narrow", "neg", "mul", "masked_fill", "where", "index_select", "take_along_dim"}
"""Calls between log-probabilities of all tokens and those that are returned."""

_GATHERS = ("gather", "take_along_dim")
_FEWEST_CLASSES = 8  # a softmax over fewer is none over a vocabulary


@dataclass(frozen=True, eq=False)
class LogSoftmax:
    """``call`` returns ``x.log_softmax(-1)``, ``[..., classes]``."""

    call: Call
    x: Value

    def edits(self, compute: Callable[[Tensor], Tensor]) -> tuple[Edit, ...]:
        """Return the edits that compute something else of the logits."""
        return (edit(self.call, (self.x,), lambda was, x: compute(x).to(was.dtype)),)


def log_softmaxes(trace: Trace) -> list[LogSoftmax]:
    """Return every log-softmax over the last dimension, in order."""
    found = [call for call in trace.calls if call.name == "log_softmax" and len(call.outputs) == len(call.inputs) == 1]
    return [LogSoftmax(call, call.inputs[0]) for call in found if _is_over_classes(trace, call)]


def _is_over_classes(trace: Trace, call: Call) -> bool:
    x, result = trace.tensor(call.inputs[0]), trace.tensor(call.outputs[0])
    if x.shape != result.shape or not x.numel() or x.shape[-1] < _FEWEST_CLASSES:
        return False
    first, computed = (one.flatten(0, -2)[0] if one.dim() > 1 else one for one in (x, result))  # all may be large
    return torch.allclose(first.log_softmax(-1).to(computed.dtype), computed)


def returned_log_probs(trace: Trace, outputs: dict[str, Tensor]) -> tuple[str, ...]:
    """Return the names of the outputs that are log-probabilities of one token a place, or their negatives."""
    made = [one.call.outputs[0] for one in log_softmaxes(trace)]
    made += [one.call.outputs[0] for one in cross_entropies(trace) if one.average is None]
    reached = [x for value in made for x in _reached(trace, value)]
    return tuple(
        name
        for name, output in outputs.items()
        if output.dim() and any(x.shape == output.shape and torch.equal(x, output) for x in reached)
    )


def _reached(trace: Trace, value: Value) -> Iterator[Tensor]:
    """Yield what is taken of log-probabilities: a number for each place, no longer one for each class."""
    classes = trace.tensor(value).shape[-1]
    for made in chain(trace, value, _TAKEN | set(_GATHERS)):
        x = trace.tensor(made)
        if x.dim() and x.shape[-1] != classes:
            yield x


# Mistakes in log-probabilities.


def log_prob_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every known mistake in the reference's log-probabilities, but for their precision."""
    found = log_softmaxes(trace)
    temperatures = numbers(_temperature, [1.0], TEMPERATURES)
    yield from everywhere_and_somewhere(temperatures, found, lambda one: one.call.module)
    losses = [one for one in cross_entropies(trace) if one.average is None]
    of_losses = numbers(_temperature_of_loss, [1.0], TEMPERATURES)
    yield from everywhere_and_somewhere(of_losses, losses, lambda one: one.call.module)
    for call in trace.calls:
        if call.name in _GATHERS and (selected := _selected(trace, call)) is not None:
            yield from _shifted(selected)


_TEMPERATURE = (
    "take log-probabilities of the logits as they are on both sides; here they are of logits divided by a temperature "
    "of {:.4g}"
)


def _temperature(value: float) -> Mistake[LogSoftmax]:
    return Mistake(
        "temperature",
        f"temperature {value:.4g}",
        _TEMPERATURE.format(value),
        lambda one: one.edits(lambda x: (x / value).log_softmax(-1)),
    )


def _temperature_of_loss(value: float) -> Mistake[CrossEntropy]:
    return Mistake(
        "temperature", f"temperature {value:.4g}", _TEMPERATURE.format(value), lambda one: one.edits(temperature=value)
    )


@dataclass(frozen=True, eq=False)
class _Selected:
    """``call`` takes log-probabilities of ``ids[:, later : later + count]`` at ``logits[:, first : first + count]``."""

    call: Call
    logits: Value
    ids: Value
    first: int
    later: int
    count: int

    def edits(self, by_logits: int, by_ids: int, edge: str) -> tuple[Edit, ...]:
        """Return the edits that take logits and labels of other positions."""

        def compute(was: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
            place = torch.arange(self.count, device=logits.device)
            of_logits, of_ids = place + self.first + by_logits, place + self.later + by_ids
            logits, labels = _at(logits, of_logits, edge), _at(ids, of_ids, edge)
            taken = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
            if edge == "zero":
                inside = (of_logits >= 0) & (of_ids >= 0) & (of_logits < len(logits[0])) & (of_ids < len(ids[0]))
                taken = taken * inside
            return taken.view_as(was).to(was.dtype)

        return (edit(self.call, (self.logits, self.ids), compute),)


def _at(x: Tensor, places: Tensor, edge: str) -> Tensor:
    return x[:, places % x.shape[1] if edge == "wrap" else places.clamp(0, x.shape[1] - 1)]


_MOVED = {
    (-1, 0): "each label meets the logits of the position before its own",
    (1, 0): "each label meets the logits of the position after its own",
    (0, -1): "each position's logits meet the label before theirs",
    (0, 1): "each position's logits meet the label after theirs",
    (-1, -1): "each is that of the token before",
    (1, 1): "each is that of the token after",
}


def _shifted(one: _Selected) -> Iterator[Hypothesis]:
    for (by_logits, by_ids), described in _MOVED.items():
        for edge in ("clamp", "wrap", "zero"):
            yield Hypothesis(
                "labels-shifted",
                f"log-probabilities: {described}, {edge} at the end",
                f"take each token's log-probability at the logits of the position before it, as the reference does; "
                f"{described}",
                one.edits(by_logits, by_ids, edge),
            )


def _selected(trace: Trace, call: Call) -> _Selected | None:
    if len(call.inputs) != 2:
        return None
    given, index = call.inputs
    made = trace.producer(back(trace, given, RESHAPES | {"getitem", "narrow"}))
    chosen = trace.tensor(index)
    if made is None or made.name != "log_softmax" or trace.tensor(given).dim() != 3 or chosen.shape[-1] != 1:
        return None
    labels, count = chosen[..., 0], chosen.shape[1]
    ids = _whole(trace, index, labels, 2)
    used = trace.tensor(given)[:, :count]
    logits = _whole(trace, given, used, 3)
    of_softmax = _whole(trace, made.inputs[0], trace.tensor(made.inputs[0]), 3)
    if ids is None or logits is None or of_softmax is None:
        return None
    return _Selected(call, of_softmax[0], ids[0], of_softmax[1] + logits[1], ids[1], count)


def _whole(trace: Trace, value: Value, part: Tensor, dims: int) -> tuple[Value, int] | None:
    """Return the value with the most positions that a part is cut from, up to a softmax, and where it begins there."""
    found: tuple[Value, int] | None = None
    while True:
        x = trace.tensor(value)
        if x.dim() == dims and x.shape[0] == part.shape[0] and x.shape[2:] == part.shape[2:]:
            count = part.shape[1]
            start = next((i for i in range(x.shape[1] - count + 1) if torch.equal(x[:, i : i + count], part)), None)
            if start is not None and (found is None or x.shape[1] > trace.tensor(found[0]).shape[1]):
                found = value, start
        made = trace.producer(value)
        if made is None or made.name not in RESHAPES | {"getitem", "narrow"} or not made.inputs:
            return found
        value = made.inputs[0]
