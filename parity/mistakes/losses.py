"""Mistakes in losses and in log-probabilities of given tokens: averages, labels, smoothing and temperature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from parity.mistakes.alternatives import numbers
from parity.mistakes.hypothesis import Hypothesis, Mistake, at_each_scope, with_attributes
from parity.mistakes.usual_numbers import USUAL
from parity.trace.trace import (
    CASTS,
    RESHAPES,
    Call,
    Edit,
    Trace,
    Value,
    back,
    binary,
    chain,
    edit,
    instead,
    once_a_trace,
)

# Mistakes in the average of losses over tokens.


OF_COUNTED = "the mean over the tokens that count"
SUM = "the sum over all tokens"
AVERAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    OF_COUNTED: lambda losses, counts: losses.sum() / counts.sum(),
    "the mean over all tokens, those that do not count included": lambda losses, counts: losses.mean(),
    "the mean of each sequence's mean": lambda losses, counts: (losses.sum(-1) / counts.sum(-1)).mean(),
    "the mean of each sequence's sum": lambda losses, counts: losses.sum(-1).mean(),
    SUM: lambda losses, counts: losses.sum(),
}
"""Averages by name. Losses are ``[sequences, tokens]``, 0 for tokens that do not count; counts are 1 or 0."""


def loss_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield other averages of the reference's losses ``[batch, seq]``, where only some tokens count."""
    for call in trace.calls:
        summed = _average(trace, call)
        for described, average in AVERAGES.items() if summed else ():
            if described != OF_COUNTED:
                yield Hypothesis(
                    "loss-scale",
                    f"loss as {described}",
                    f"divide the summed loss by the number of tokens that count; the port's loss is {described}",
                    (instead(call, summed or (), average),),
                )


def _average(trace: Trace, call: Call) -> tuple[Value, ...] | None:
    """Return the losses and the mask of those that count, if the call divides a sum of losses by their count."""
    named = binary(call)
    if named is None or named[0] != "div":
        return None
    summed = [trace.producer(back(trace, operand, CASTS | {"clamp", "clamp_min"})) for operand in named[1:]]
    values = [one.inputs[0] for one in summed if one is not None and one.name == "sum" and len(one.inputs) == 1]
    if len(values) != 2 or trace.tensor(values[0]).dim() != 2:
        return None
    return tuple(values) if trace.tensor(values[0]).shape == trace.tensor(values[1]).shape else None


# Mistakes in calls of cross entropy: averages, smoothing, and which labels count.


_SIGNATURES = {name: inspect.signature(getattr(F, name)) for name in ("cross_entropy", "nll_loss")}
_REDUCTIONS = {"mean": OF_COUNTED, "sum": SUM, "none": None}
_IGNORES_NONE = -100  # PyTorch's default, which is never a label


@dataclass(frozen=True)
class CrossEntropy:
    """An average of ``cross_entropy(logits, labels)``, or of ``nll_loss``, whose log probabilities are logits too.

    Attributes:
        call: the call that returns it.
        logits: ``[tokens, classes]``, or ``[sequences, classes, positions]``.
        labels: whole numbers, ``[tokens]`` or ``[sequences, positions]``.
        sequences: how many there are; 1 if that is not known.
        average: a key of ``AVERAGES``; None if the loss of every token is returned.
        ignored: the label that does not count.
        smoothing: the label smoothing.
        has_ignored: whether a label of the traced pass does not count.
        pads: the usual ids of padding that are among the labels of the traced pass.
        z_loss: the factor of each token's squared logsumexp, which is added to its loss.
        clamped: whether negative labels, which are not classes, count as class 0.
        temperature: the number by which logits are divided.
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
    temperature: float = 1.0

    def compute(self, was: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss that replaces the call's result."""
        labels = labels.clamp(min=0) if self.clamped else labels
        logits = logits / self.temperature
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
        """Return the edits that compute the loss with other attributes; empty if they are the same."""
        changed = replace(self, **changes)  # type: ignore[arg-type]
        return () if changed == self else (edit(self.call, (self.logits, self.labels), changed.compute),)


@once_a_trace
def cross_entropies(trace: Trace) -> list[CrossEntropy]:
    """Return every cross entropy whose labels are whole numbers and whose classes have no weights, in order."""
    return [one for call in trace.calls if (one := _called(trace, call)) is not None]


def cross_entropy_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every known mistake that could have been made with the reference's cross entropies."""
    found = cross_entropies(trace)
    if found:
        yield from at_each_scope(_mistakes(found), found, lambda one: one.call.module)


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
    pads = tuple(label for label in USUAL.pad_ids if bool((trace.tensor(labels) == label).any()))
    return CrossEntropy(
        call, given["input"], labels, _sequences(trace, labels), average, ignored, smoothing, has_ignored, pads
    )


def _sequences(trace: Trace, labels: Value) -> int:
    """Return how many rows the labels had before they were flattened; 1 if that is not known."""
    value = labels
    while trace.tensor(value).dim() < 2:
        made = trace.producer(value)
        if made is None or made.name not in RESHAPES or not made.inputs:
            return 1
        value = made.inputs[0]
    return trace.tensor(value).shape[0]


def _mistakes(found: list[CrossEntropy]) -> Iterator[Mistake[CrossEntropy]]:
    rights = sorted({one.average for one in found if one.average is not None})
    for right, average in product(rights, AVERAGES):
        whose = f"for {right} " if len(rights) > 1 else ""  # a port may take one of them wrong
        repair = f"take {right}, as the reference does; the port's is {average}"
        is_so = with_attributes(lambda one, right=right: one.average == right, average=average)  # type: ignore[misc]
        if average != right:
            yield Mistake("loss-scale", f"loss {whose}as {average}", repair, is_so)
    yield from _label_mistakes(found)
    smoothing = " or ".join(sorted({f"{one.smoothing:g}" for one in found}))

    def smoothed(value: float) -> Mistake[CrossEntropy]:
        repair = f"smooth labels by {smoothing}, as the reference does; the port smooths them by {value:.4g}"
        edits = with_attributes(lambda one: value < 1.0, smoothing=value)
        return Mistake("label-smoothing", f"label smoothing {value:.4g}", repair, edits)

    yield smoothed(0.0)
    yield from numbers(smoothed, sorted({one.smoothing for one in found}), USUAL.label_smoothings)
    yield from numbers(_with_z_loss, usual=USUAL.z_losses)


def _label_mistakes(found: list[CrossEntropy]) -> Iterator[Mistake[CrossEntropy]]:
    for label in USUAL.pad_ids:
        ignored = with_attributes(lambda one, label=label: label in one.pads, ignored=label)  # type: ignore[misc]
        repair = f"count tokens whose label is {label}, as the reference does; the port ignores them"
        yield Mistake("ignored-label", f"label {label} ignored", repair, ignored)
    seen = with_attributes(lambda one: one.ignored >= 0, ignored=_IGNORES_NONE)
    clamped = with_attributes(lambda one: one.ignored < 0 and one.has_ignored, clamped=True)
    for label in sorted({one.ignored for one in found}, key=lambda label: (label < 0, label)):
        right = f"leave out tokens whose label is {label}, as the reference does (ignore_index); the port counts them"
        if label >= 0:
            yield Mistake("ignored-label", f"label {label} not ignored", right, seen)
        else:
            yield Mistake("ignored-label", f"label {label} clamped to 0", f"{right} as class 0", clamped)


def _with_z_loss(factor: float) -> Mistake[CrossEntropy]:
    right = "add to the cross entropy no more than the reference does"
    repair = f"{right}; the logits' squared logsumexp times {factor:.4g} is added to that"
    return Mistake("z-loss", f"z-loss {factor:.4g}", repair, with_attributes(z_loss=factor))


# Mistakes in the shift of labels against logits: a position's logits meet another position's label.


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
    """A cross entropy of logits with the labels ``further`` positions on."""

    loss: CrossEntropy
    logits: _Part
    labels: _Part

    @property
    def further(self) -> int:
        return self.labels.start - self.logits.start

    def edits(self, further: int, shorter: bool) -> tuple[Edit, ...]:
        """Return the edits that take labels of other positions; empty if they are the same or no positions are left.

        Args:
            further: how many positions on the label is.
            shorter: whether only as many positions count as in the reference, though more could.
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

    def run_on(self) -> tuple[Edit, ...]:
        """Return the edits that take the rows for one sequence, without what follows each row's last label."""
        if self.further < 1 or self.loss.average is None:
            return ()

        def compute(was: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
            after = (labels != self.loss.ignored).flip(1).cumsum(1).flip(1)  # how many labels are still to come
            tokens = (after > 0)[:, : logits.shape[1]]
            x, y = logits[:, : tokens.shape[1]][tokens], labels[:, : tokens.shape[1]][tokens]
            return replace(self.loss, sequences=1).compute(was, x[: -self.further], y[self.further :])

        return (edit(self.loss.call, (self.logits.whole, self.labels.whole), compute),)


def label_shift_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield mistakes with labels of other positions, for cross entropies whose logits and labels have positions."""
    found = [shifted for loss in cross_entropies(trace) if (shifted := _shifted(trace, loss)) is not None]
    if found:
        yield from at_each_scope(_shift_mistakes(found), found, lambda one: one.loss.call.module)


def _shift_mistakes(found: list[_Shifted]) -> Iterator[Mistake[_Shifted]]:
    right = " or ".join(sorted({_WHOSE.get(one.further, f"the label {one.further} further on") for one in found}))
    for further, whose in _WHOSE.items():
        for shorter, where in ((False, ""), (True, ", as many positions as in the reference")):
            other = f"the port compares them with {whose}{where}"
            repair = f"compare each position's logits with {right}, as the reference does; {other}"
            moved = with_attributes(further=further, shorter=shorter)
            yield Mistake("labels-shifted", f"labels {further:+d} positions{where}", repair, moved)
    yield Mistake(
        "labels-shifted",
        "labels across the borders of packed rows",
        "compare the last token of a sequence with no label, as the reference does; the port compares it with the next "
        "sequence's first label",
        _Shifted.run_on,
    )
    has_several_heads = len({one.further for one in found}) > 1
    for by, whose in ((-1, "the label before"), (1, "the label after")) if has_several_heads else ():
        yield Mistake(
            "labels-shifted",
            f"labels {by:+d} positions from each head's",
            f"compare each head's logits with {right}, as the reference does; each meets {whose}",
            lambda one, by=by: one.edits(one.further + by, shorter=False),  # type: ignore[misc]
        )


def _shifted(trace: Trace, loss: CrossEntropy) -> _Shifted | None:
    labels = _part(trace, loss.labels, 2, None)
    if labels is None or trace.tensor(loss.logits).dim() > 3:
        return None
    logits = _part(trace, loss.logits, 3, labels.count)
    return None if logits is None or logits.count != labels.count else _Shifted(loss, logits, labels)


def _part(trace: Trace, value: Value, dims: int, count: int | None) -> _Part | None:
    """Return the part of a whole that became ``value`` by flattening or moving classes; None if it is not found.

    Args:
        trace: the reference's trace.
        value: logits or labels, as they are passed to the loss.
        dims: how many dimensions they have before they are flattened.
        count: how many positions are read; None for all.
    """
    before = list(_cut_from(trace, value))
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


def _cut_from(trace: Trace, value: Value) -> Iterator[Value]:
    """Yield a value and those that it was cut or reshaped from, the nearest first."""
    yield value
    while (made := trace.producer(value)) is not None and made.name in _SLICES and made.inputs:
        value = made.inputs[0]
        yield value


def _starts(whole: Tensor, part: Tensor) -> int | None:
    """Return where a part begins in the whole's second dimension; None if it is not a part of it."""
    if whole.dim() != part.dim() or whole.shape[0] != part.shape[0] or whole.shape[2:] != part.shape[2:]:
        return None
    count = part.shape[1]
    starts = range(whole.shape[1] - count + 1)
    return next((start for start in starts if torch.equal(whole[:, start : start + count], part)), None)


# Log-probabilities of given tokens in a trace.


_TAKEN = _SLICES | {"neg", "mul", "masked_fill", "where", "index_select", "take_along_dim"}
"""Calls that may lie between the log-probabilities of all tokens and those that are returned."""

_GATHERS = ("gather", "take_along_dim")
_FEWEST_CLASSES = 8  # a softmax over fewer classes is not one over a vocabulary


@dataclass(frozen=True, eq=False)
class LogSoftmax:
    """``call`` returns ``x.log_softmax(-1)``, ``[..., classes]``."""

    call: Call
    x: Value

    def edits(self, temperature: float) -> tuple[Edit, ...]:
        """Return the edits that divide the logits by a temperature first."""
        return (instead(self.call, (self.x,), lambda x: (x / temperature).log_softmax(-1)),)


@once_a_trace
def log_softmaxes(trace: Trace) -> list[LogSoftmax]:
    """Return every log-softmax over the last dimension, in order."""
    found = [call for call in trace.calls if call.name == "log_softmax" and len(call.outputs) == len(call.inputs) == 1]
    return [LogSoftmax(call, call.inputs[0]) for call in found if _is_over_classes(trace, call)]


def _is_over_classes(trace: Trace, call: Call) -> bool:
    x, result = trace.tensor(call.inputs[0]), trace.tensor(call.outputs[0])
    if x.shape != result.shape or not x.numel() or x.shape[-1] < _FEWEST_CLASSES:
        return False
    first, computed = (one.flatten(0, -2)[0] if one.dim() > 1 else one for one in (x, result))  # the whole may be large
    return torch.allclose(first.log_softmax(-1).to(computed.dtype), computed)


def returned_log_probs(trace: Trace, outputs: dict[str, Tensor]) -> tuple[str, ...]:
    """Return the names of the outputs that are log-probabilities of one token per position, or their negatives."""
    made = [one.call.outputs[0] for one in log_softmaxes(trace)]
    made += [one.call.outputs[0] for one in cross_entropies(trace) if one.average is None]
    reached = [x for value in made for x in _reached(trace, value)]
    return tuple(
        name
        for name, output in outputs.items()
        if output.dim() and any(x.shape == output.shape and torch.equal(x, output) for x in reached)
    )


def _reached(trace: Trace, value: Value) -> Iterator[Tensor]:
    """Yield selections from log-probabilities, with one number for each position and not for each class."""
    classes = trace.tensor(value).shape[-1]
    for made in chain(trace, value, _TAKEN | set(_GATHERS)):
        x = trace.tensor(made)
        if x.dim() and x.shape[-1] != classes:
            yield x


# Mistakes of a trainer or its engine in log-probabilities.


def log_prob_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every known mistake in the reference's log-probabilities, except in their precision."""
    losses = [one for one in cross_entropies(trace) if one.average is None]
    of_tokens: tuple[Sequence[LogSoftmax | CrossEntropy], ...] = (log_softmaxes(trace), losses)
    for found in of_tokens:
        temperatures = numbers(_temperature, [1.0], USUAL.temperatures)
        yield from at_each_scope(temperatures, found, lambda one: one.call.module)
    for call in trace.calls:
        if call.name in _GATHERS and (selected := _selected(trace, call)) is not None:
            yield from _shifted_tokens(selected)


def _temperature(value: float) -> Mistake[LogSoftmax | CrossEntropy]:
    right = "take log-probabilities of the logits as they are on both sides"
    repair = f"{right}; here they are of logits divided by a temperature of {value:.4g}"
    return Mistake("temperature", f"temperature {value:.4g}", repair, with_attributes(temperature=value))


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


def _shifted_tokens(one: _Selected) -> Iterator[Hypothesis]:
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
    made = trace.producer(back(trace, given, _SLICES))
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
    """Return the longest value that a part is cut from, up to a softmax, and the position where the part begins."""
    found: tuple[Value, int] | None = None
    for before in _cut_from(trace, value):
        x = trace.tensor(before)
        start = _starts(x, part) if x.dim() == dims else None
        if start is not None and (found is None or x.shape[1] > trace.tensor(found[0]).shape[1]):
            found = before, start
    return found
