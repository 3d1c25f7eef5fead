"""Calls of cross entropy, and what ports get wrong about them: averages, smoothing, and which labels count."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor, nn

from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.losses.losses import AVERAGES, OF_COUNTED, SUM
from parity.diagnosis.mistake import Mistake, everywhere_and_somewhere
from parity.diagnosis.walk import RESHAPES
from parity.watching.trace import Call, Edit, Trace, Value, edit

_SIGNATURES = {name: inspect.signature(getattr(F, name)) for name in ("cross_entropy", "nll_loss")}
_REDUCTIONS = {"mean": OF_COUNTED, "sum": SUM, "none": None}
_SMOOTHING = 0.1  # what most who smooth labels take
_Z_LOSSES = (1e-4, 1e-3, 1e-2)
_IGNORES_NONE = -100  # PyTorch's default, which is no label
_PAD_IDS = (0, 1, 2)


@dataclass(frozen=True)
class CrossEntropy:
    """An average of ``cross_entropy(logits, labels)``; of log probabilities, which are logits too, ``nll_loss``.

    Attributes:
        call: which returns it.
        logits: ``[tokens, classes]``, or ``[sequences, classes, positions]``.
        labels: whole numbers, ``[tokens]`` or ``[sequences, positions]``.
        sequences: how many there are; 1 where that is not known.
        average: of ``AVERAGES``; None where every token's own loss is returned.
        ignored: the label that does not count.
        smoothing: of labels.
        has_ignored: whether a label of the traced pass does not count.
        pads: those of ``_PAD_IDS`` that are among the labels of the traced pass.
        z_loss: times each token's squared logarithm of the sum of exponentials, which is added to its loss.
        clamped: whether a label that is no class counts as class 0.
    """

    call: Call
    logits: Value
    labels: Value
    sequences: int
    average: str | None
    ignored: int
    smoothing: float
    has_ignored: bool = False
    pads: tuple[int, ...] = ()
    z_loss: float = 0.0
    clamped: bool = False

    def compute(self, was: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss, in the place of what the call returned."""
        labels = labels.clamp(min=0) if self.clamped else labels
        losses = F.cross_entropy(
            logits, labels, ignore_index=self.ignored, reduction="none", label_smoothing=self.smoothing
        )
        if self.z_loss:
            losses = losses + self.z_loss * logits.logsumexp(1).square() * (labels != self.ignored)
        if self.average is None:
            return losses.view_as(was).to(was.dtype)
        counts = (labels != self.ignored).to(losses.dtype)
        by_sequence = (x.reshape(self.sequences, -1) for x in (losses, counts))
        return AVERAGES[self.average](*by_sequence).to(was.dtype)

    def edits(self, **changes: object) -> tuple[Edit, ...]:
        """The loss is to be computed with other attributes; none where they are the same."""
        changed = replace(self, **changes)  # type: ignore[arg-type]
        return () if changed == self else (edit(self.call, (self.logits, self.labels), changed.compute),)


def cross_entropies(trace: Trace) -> list[CrossEntropy]:
    """Every cross entropy with labels that are whole numbers and classes of one weight, in order."""
    return [one for call in trace.calls if (one := _called(trace, call)) is not None]


def cross_entropy_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with the reference's cross entropies."""
    found = cross_entropies(trace)
    if found:
        yield from everywhere_and_somewhere(_mistakes(found), found, module, lambda one: one.call.module)


def _called(trace: Trace, call: Call) -> CrossEntropy | None:
    if call.name not in _SIGNATURES or len(call.outputs) != 1:
        return None
    bound = _SIGNATURES[call.name].bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    labels = given["target"]
    is_plain = given["weight"] is None and given["reduce"] is None and given["size_average"] is None
    if not is_plain or trace.tensor(labels).is_floating_point() or trace.tensor(given["input"]).dim() < 2:
        return None
    smoothing = given.get("label_smoothing", 0.0)
    average = _REDUCTIONS[given["reduction"]]
    ignored = given["ignore_index"]
    has_ignored = bool((trace.tensor(labels) == ignored).any())
    pads = tuple(label for label in _PAD_IDS if bool((trace.tensor(labels) == label).any()))
    return CrossEntropy(
        call, given["input"], labels, _sequences(trace, labels), average, ignored, smoothing, has_ignored, pads
    )


def _sequences(trace: Trace, labels: Value) -> int:
    """Into how many rows the labels came before they were made one."""
    value = labels
    while trace.tensor(value).dim() < 2:
        made = trace.producer(value)
        if made is None or made.name not in RESHAPES or not made.inputs:
            return 1
        value = made.inputs[0]
    return trace.tensor(value).shape[0]


def _mistakes(found: list[CrossEntropy]) -> Iterator[Mistake[CrossEntropy]]:
    right = " or ".join(sorted({one.average for one in found if one.average is not None}))
    for average in AVERAGES:
        yield Mistake(
            "loss-scale", f"loss as {average}", f"take {right}, as the reference does; it is {average}", _by(average)
        )
    yield from _label_mistakes(found)
    smoothing = " or ".join(sorted({f"{one.smoothing:g}" for one in found}))

    def smoothed(value: float) -> Mistake[CrossEntropy]:
        return Mistake(
            "label-smoothing",
            f"label smoothing {value:.4g}",
            f"smooth labels by {smoothing}, as the reference does; they are smoothed by {value:.4g}",
            lambda one: one.edits(smoothing=value) if value < 1.0 else (),
            value=value or None,
            tuned=smoothed if value else None,
        )

    yield smoothed(0.0)
    yield smoothed(_SMOOTHING)
    yield from map(smoothed, sorted({2.0 * one.smoothing for one in found if one.smoothing}))
    yield from map(_with_z_loss, _Z_LOSSES)


def _label_mistakes(found: list[CrossEntropy]) -> Iterator[Mistake[CrossEntropy]]:
    for label in _PAD_IDS:
        yield Mistake(
            "ignored-label",
            f"label {label} ignored",
            f"count tokens whose label is {label}, as the reference does; they are ignored",
            _ignoring(label),
        )
    for label in sorted({one.ignored for one in found if one.ignored >= 0}):
        yield Mistake(
            "ignored-label",
            f"label {label} not ignored",
            f"leave out tokens whose label is {label}, as the reference does (ignore_index); they count",
            lambda one: one.edits(ignored=_IGNORES_NONE) if one.ignored >= 0 else (),
        )
    for label in sorted({one.ignored for one in found if one.ignored < 0}):
        yield Mistake(
            "ignored-label",
            f"label {label} clamped to 0",
            f"leave out tokens whose label is {label}, as the reference does (ignore_index); they count as class 0",
            lambda one: one.edits(clamped=True) if one.ignored < 0 and one.has_ignored else (),
        )


def _with_z_loss(factor: float) -> Mistake[CrossEntropy]:
    return Mistake(
        "z-loss",
        f"z-loss {factor:.4g}",
        f"add nothing to the cross entropy, as the reference does; the logits' squared logsumexp times {factor:.4g} "
        "is added",
        lambda one: one.edits(z_loss=factor),
        value=factor,
        tuned=_with_z_loss,
    )


def _by(average: str) -> Callable[[CrossEntropy], tuple[Edit, ...]]:
    return lambda one: () if one.average is None else one.edits(average=average)


def _ignoring(label: int) -> Callable[[CrossEntropy], tuple[Edit, ...]]:
    return lambda one: one.edits(ignored=label) if label in one.pads else ()
