"""Which position's label each position's logits are compared with, and ports that take another one's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.losses.cross_entropy import CrossEntropy, cross_entropies
from parity.diagnosis.mistake import Mistake, everywhere_and_somewhere
from parity.diagnosis.walk import RESHAPES
from parity.watching.trace import Edit, Trace, Value, edit

_SLICES = RESHAPES | {"getitem", "narrow"}
_WHOSE = {
    -1: "the label of the position before",
    0: "its own label",
    1: "the next position's label",
    2: "the label of the second next position",
}


@dataclass(frozen=True)
class _Part:
    """``whole[:, start : start + count]`` of logits or labels ``[sequences, positions, ...]``."""

    whole: Value
    start: int
    count: int
    positions: int  # of the whole


@dataclass(frozen=True)
class _Shifted:
    """A cross entropy of logits with labels so many positions ``further``."""

    loss: CrossEntropy
    logits: _Part
    labels: _Part

    @property
    def further(self) -> int:
        return self.labels.start - self.logits.start

    def edits(self, further: int, shorter: bool) -> tuple[Edit, ...]:
        """Another label is taken; none where it is the same, or no two positions meet.

        Args:
            further: how many positions on it is.
            shorter: whether no more positions count than the reference's, where more could.
        """
        first, label = max(0, -further), max(0, further)
        count = min(self.logits.positions - first, self.labels.positions - label)
        if further == self.further or count < 1 or (shorter and count <= self.logits.count):
            return ()
        count = self.logits.count if shorter else count

        def compute(was: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
            x = logits[:, first : first + count].flatten(0, 1)
            return self.loss.compute(was, x, labels[:, label : label + count].flatten())

        return (edit(self.loss.call, (self.logits.whole, self.labels.whole), compute),)


def label_shift_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Labels of other positions, for each cross entropy of the reference whose logits and labels have positions."""
    found = [shifted for loss in cross_entropies(trace) if (shifted := _shifted(trace, loss)) is not None]
    if found:
        yield from everywhere_and_somewhere(_mistakes(found), found, module, lambda one: one.loss.call.module)


def _mistakes(found: list[_Shifted]) -> Iterator[Mistake[_Shifted]]:
    right = " or ".join(sorted({_WHOSE.get(one.further, f"the label {one.further} further on") for one in found}))
    for further, whose in _WHOSE.items():
        for shorter, where in ((False, ""), (True, ", as many positions as in the reference")):
            yield Mistake(
                "labels-shifted",
                f"labels {further:+d} positions{where}",
                f"compare each position's logits with {right}, as the reference does; they meet {whose}{where}",
                _by(further, shorter),
            )


def _by(further: int, shorter: bool) -> Callable[[_Shifted], tuple[Edit, ...]]:
    return lambda one: one.edits(further, shorter)


def _shifted(trace: Trace, loss: CrossEntropy) -> _Shifted | None:
    labels = _part(trace, loss.labels, 2, None)
    if labels is None or trace.tensor(loss.logits).dim() > 3:
        return None
    logits = _part(trace, loss.logits, 3, labels.count)
    return None if logits is None or logits.count != labels.count else _Shifted(loss, logits, labels)


def _part(trace: Trace, value: Value, dims: int, count: int | None) -> _Part | None:
    """Of which whole a value is a part, before it was flattened or its classes moved; None where that is not seen.

    Args:
        trace: of the reference.
        value: logits or labels, as the loss is given them.
        dims: that they have before they are flattened.
        count: positions that are read; None for as many as there are.
    """
    before = [value]
    while (made := trace.producer(before[-1])) is not None and made.name in _SLICES and made.inputs:
        before.append(made.inputs[0])
    read = [x for x in before if trace.tensor(x).dim() == dims and count in (None, trace.tensor(x).shape[1])]
    if not read:
        return None
    used, whole = trace.tensor(read[0]), trace.tensor(read[0])
    found = _Part(read[0], 0, used.shape[1], used.shape[1])
    for x in before[before.index(read[0]) :]:
        whole = trace.tensor(x)
        starts = _starts(whole, used)
        if starts is not None and whole.shape[1] > found.positions:
            found = _Part(x, starts, used.shape[1], whole.shape[1])
    return found


def _starts(whole: Tensor, part: Tensor) -> int | None:
    """Where a part begins in the second dimension; None if it is none."""
    if whole.dim() != part.dim() or whole.shape[0] != part.shape[0] or whole.shape[2:] != part.shape[2:]:
        return None
    count = part.shape[1]
    starts = range(whole.shape[1] - count + 1)
    return next((start for start in starts if torch.equal(whole[:, start : start + count], part)), None)
