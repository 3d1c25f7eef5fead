"""Mistakes with several sequences packed in one row, and with shifted windows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from parity.mistakes.attention import HIDDEN, Attention, Bias, as_it_is, attentions, heads_of, hidden_keys, traced_bias
from parity.mistakes.hypothesis import Hypothesis, Mistake, at_each_scope
from parity.mistakes.masks import band_beside, one_sequence, right_sequences, segment_mistakes, sequences_instead
from parity.mistakes.reads import made_again
from parity.mistakes.rotation import Rotation, rotations
from parity.numerics.blocked_attention import WRITTEN_OUT, Band
from parity.trace.trace import (
    JOINS,
    RESHAPES,
    Call,
    Edit,
    Trace,
    Value,
    argument,
    binary,
    edit,
    grouped,
    instead,
    once_a_trace,
)

# Sequences that a reference attends to one by one and then joins; ports attend to all of them at once.
#
# TE's format ``thd`` takes all of them with their borders, ``cu_seqlens``. To compute what a port with other borders
# would, the edits attend to all sequences at once with a mask.


_ONE_SEQUENCE = frozenset({"getitem", "select"})  # calls that take the sequence out of a batch of one
_PADS = frozenset({"pad"})


@dataclass(frozen=True, eq=False)
class Packed:
    """Attention to sequences one by one.

    Attributes:
        call: the call that joins their contexts.
        parts: the attention to each sequence.
        layouts: the calls between each context and the join.
        bias: is added to the scores of all queries and keys; ``HIDDEN`` where they belong to different sequences.
    """

    call: Call
    parts: tuple[Attention, ...]
    layouts: tuple[tuple[Call, ...], ...]
    bias: Tensor

    def masked_by(self, bias: Bias) -> tuple[Edit, ...]:
        """Return the edits that attend to all sequences at once with another mask."""
        needs = [value for part in self.parts for value in part.needs]
        return (instead(self.call, needs, partial(self._joined, bias)),)

    def _joined(self, mask: Bias, *values: Tensor) -> Tensor:
        given = iter(values)
        heads = [[next(given) for _ in part.needs][:3] for part in self.parts]
        by_part = [
            [to_heads(x) for to_heads, x in zip(part.to_heads, of_part, strict=True)]
            for part, of_part in zip(self.parts, heads, strict=True)
        ]
        query, key, value = (torch.cat(some, -2) for some in zip(*by_part, strict=True))
        context = _at_once(self.parts[0], mask).compute(query, key, value, self.bias.to(query))
        parts = context.split([part[0].shape[-2] for part in by_part], -2)
        laid_out = [
            reduce(lambda x, call: made_again(call, [x]), layout, part.from_heads(x))
            for part, x, layout in zip(self.parts, parts, self.layouts, strict=True)
        ]
        joined: Tensor = self.call.function(laid_out, *self.call.args[1:], **self.call.kwargs)
        return joined


def _at_once(attention: Attention, mask: Bias) -> Attention:
    """Return an attention that computes with query, key and value as ``[..., heads, seq, head_dim]``, and a bias."""
    return replace(
        attention,
        masks=attention.needs[:1],  # a placeholder: ``compute`` gets the bias itself
        mask_scales=(),
        added=(),
        is_causal=False,
        mask=mask,
        to_heads=(as_it_is,) * 3,
        from_heads=as_it_is,
    )


@once_a_trace
def packed_attentions(trace: Trace) -> list[Packed]:
    """Return every attention that takes its sequences one by one, in order."""
    made = {one.call.outputs[0].number: one for one in attentions(trace) if one.sinks is None}
    return [packed for call in trace.calls if (packed := _packed(trace, call, made)) is not None] if made else []


def packed_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every known mistake that could have been made with the borders of the reference's sequences."""
    found = packed_attentions(trace)
    if found:
        mistakes = segment_mistakes(found[0].bias)
        yield from at_each_scope(mistakes, found, lambda one: one.call.module)
    batches = [batch for one in attentions(trace) if (batch := _batch(trace, one)) is not None]
    for some in grouped(batches, lambda one: (one.lengths, one.band)).values():
        yield from at_each_scope(_of_batch(some[0]), some, lambda one: one.attention.call.module)


def _packed(trace: Trace, call: Call, made: dict[int, Attention]) -> Packed | None:
    if call.name not in JOINS or len(call.inputs) < 2 or not isinstance(call.args[0], (tuple, list)):
        return None
    ways = [_way(trace, value, made) for value in call.inputs]
    parts = [way[0] for way in ways if way is not None]
    if len(parts) < len(ways):
        return None
    biases = [_own_bias(trace, part) for part in parts]
    lengths = [bias.shape[-1] for bias in biases]
    if any(bias.shape[-2] != bias.shape[-1] for bias in biases):
        return None
    together = torch.full((sum(lengths), sum(lengths)), HIDDEN, dtype=biases[0].dtype, device=biases[0].device)
    start = 0
    for length, bias in zip(lengths, biases, strict=True):
        together[start : start + length, start : start + length] = bias
        start += length
    return Packed(call, tuple(parts), tuple(way[1] for way in ways if way is not None), together)


# The rows of a batch, which ports pack as one: without padding and with ``cu_seqlens``, or as one sequence by mistake.


@dataclass(frozen=True, eq=False)
class _Batch:
    """Attention to the rows of a batch, in each of which queries see a band of keys, apart from padding.

    Attributes:
        attention: computes ``[batch, heads, seq, head_dim]``.
        tokens: which positions are no padding, ``[batch, seq]``.
        lengths: how many tokens each row has.
        band: how many keys before and after its own a query sees.
        bias: is added to the scores of the packed rows, ``[tokens, tokens]``; ``HIDDEN`` outside of row and band.
        turned: the rotations of query and key by positions that begin again in each row; empty if there are none.
    """

    attention: Attention
    tokens: Tensor
    lengths: tuple[int, ...]
    band: Band
    bias: Tensor
    turned: tuple[Rotation, ...] = ()

    def masked_by(self, bias: Bias) -> tuple[Edit, ...]:
        """Return the edits that attend to all rows at once with another mask."""
        return (instead(self.attention.call, self.attention.needs, partial(self._packed, bias)),)

    def run_on(self) -> tuple[Edit, ...]:
        """Return the edits that take all rows for one sequence, in mask and positions alike."""
        whole = sequences_instead([len(self.bias)], self.band)
        on = partial(self._packed, whole, turned=self.turned)
        return (instead(self.attention.call, self.attention.needs, on),)

    def _packed(self, mask: Bias, *values: Tensor, turned: tuple[Rotation, ...] = ()) -> Tensor:
        tokens = self.tokens.to(values[0].device)
        heads = [to_heads(x) for to_heads, x in zip(self.attention.to_heads, values[:3], strict=True)]
        query, key, value = (x.transpose(1, 2)[tokens].transpose(0, 1)[None] for x in heads)
        if turned:
            query, key = (self._turned_on(rotation, x) for rotation, x in zip(turned, (query, key), strict=True))
        context = _at_once(self.attention, mask).compute(query, key, value, self.bias.to(query))
        padded = context.new_zeros(*tokens.shape, *context.shape[1::2])
        padded[tokens] = context[0].transpose(0, 1)
        return self.attention.from_heads(padded.transpose(1, 2))

    def _turned_on(self, rotation: Rotation, x: Tensor) -> Tensor:
        """Return rotated heads ``[..., tokens, head_dim]`` turned on, as if positions ran on from row to row."""
        assert rotation.phases is not None
        positions, frequency = (one.to(self.tokens.device) for one in rotation.phases)
        own = positions.expand(self.tokens.shape)[self.tokens]
        further = torch.arange(len(own), device=own.device) + positions[0] - own
        form, angles = rotation.result_form or rotation.form, further[:, None] * frequency
        turn = replace(rotation, angles=angles, form=form, result_form=None, axis=-2, amplitude=1.0)
        return turn.compute(x)


def _of_batch(first: _Batch) -> Iterator[Mistake[_Batch]]:
    """Yield the mistakes of ports that pack the rows of batches like this one."""
    is_padded = not bool(first.tokens.all())
    if is_padded and first.band in (Band(), Band(right=0)):
        yield from segment_mistakes(first.bias)
    else:
        yield one_sequence(first.lengths, first.band)
    if first.turned:
        named = "one sequence, across all borders, with positions that run on"
        yield Mistake("mask", named, f"{right_sequences(first.lengths)}; the port has {named}", _Batch.run_on)


def _batch(trace: Trace, attention: Attention) -> _Batch | None:
    """Return the attention as one to a batch; None if it has one row, or a mask that packed rows do not have."""
    query, key, _ = heads_of(trace, attention)
    if query.dim() != 4 or len(query) < 2 or query.shape[-2] != key.shape[-2] or attention.sinks is not None:
        return None
    bias = traced_bias(trace, attention)
    hidden = hidden_keys(bias).expand(*query.shape[:3], -1)
    tokens = ~hidden[:, 0].all(-2)
    count = int(tokens.sum())
    is_biased = bool((bias[~hidden_keys(bias)] != 0.0).any())
    if is_biased or not bool(tokens.any(1).all()) or query.shape[1] * count**2 > WRITTEN_OUT:
        return None
    others = ~(tokens[:, None, None, :] & tokens[:, None, :, None]).expand_as(hidden)  # whatever padded queries see
    band = band_beside(others, hidden | others)
    if band is None:
        return None
    lengths = tuple(tokens.sum(1).tolist())
    packed = sequences_instead(lengths, band)(bias.new_zeros(count, count))
    return _Batch(attention, tokens, lengths, band, packed, _turned(trace, attention, query.shape))


def _turned(trace: Trace, attention: Attention, heads: torch.Size) -> tuple[Rotation, ...]:
    """Return the rotations of an attention's query and key, ``[..., seq, head_dim]``; empty if one is not known."""
    found = {
        one.role: one
        for one in rotations(trace)
        if one.attention == attention.call.site
        and one.phases is not None
        and (len(one.angles), one.head_dim) == tuple(heads[-2:])
    }
    return (found["query"], found["key"]) if len(found) == 2 else ()


def _own_bias(trace: Trace, part: Attention) -> Tensor:
    """Return what the reference adds to the first head's scores, ``[queries, keys]``."""
    query, key = (to(trace.tensor(x)) for to, x in zip(part.to_heads[:2], (part.query, part.key), strict=True))
    like = query.new_zeros(*query.shape[:-1], key.shape[-2])
    bias = part.bias(like, *map(trace.tensor, (*part.masks, *part.added)))
    return bias[(0,) * (bias.dim() - 2)]


def _way(trace: Trace, value: Value, made: dict[int, Attention]) -> tuple[Attention, tuple[Call, ...]] | None:
    """Return the attention that made a value, and the calls in between, which may only change its layout or pad it."""
    calls: list[Call] = []
    while value.number not in made:
        call = trace.producer(value)
        if call is None or len(call.inputs) != 1 or not _lays_out(trace, call):
            return None
        calls.append(call)
        value = call.inputs[0]
    return made[value.number], tuple(reversed(calls))


def _lays_out(trace: Trace, call: Call) -> bool:
    """Return whether a call only changes the layout of its input or pads it, without leaving anything out."""
    if call.name in _ONE_SEQUENCE:
        return trace.tensor(call.inputs[0]).numel() == trace.tensor(call.outputs[0]).numel()
    return call.name in RESHAPES | _PADS


# Mistakes in the shift of Swin's windows: in the rolls there and back, and in the mask between places that are not
# neighbours (arXiv 2103.14030).
#
# A reference may hold the mask as a table or make it, so it is recognised by its values.


_MOST_SHIFTS = 8  # try this many other shifts, the smallest first


@dataclass(frozen=True, eq=False)
class _Roll:
    """``call`` rolls two dimensions by ``shift`` places, in either direction."""

    call: Call
    shift: int
    side: int

    def edits(self, shift: int) -> Edit:
        """Return the edit that rolls by another number of places."""
        amounts, dims = _arguments(self.call)
        others = tuple(int(math.copysign(shift, amount)) for amount in amounts)
        return edit(self.call, self.call.inputs, lambda was, x: x.roll(others, dims))


@dataclass(frozen=True, eq=False)
class _Mask:
    """``call`` adds the mask of windows, which is its input number ``position``, to scores."""

    call: Call
    position: int
    side: int
    window: int
    shift: int

    def edits(self, shift: int) -> Edit:
        """Return the edit that adds the mask of another shift."""
        apart = _apart(self.side, self.window, shift)

        def compute(*inputs: Tensor) -> Any:
            table, others = inputs[self.position], list(inputs)
            others[self.position] = apart.to(table.device).reshape(table.shape) * table.amin()
            return made_again(self.call, others)

        return instead(self.call, self.call.inputs, compute)


def shifted_window_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield another shift of the windows and their mask, of the windows alone, or of the mask alone."""
    found_rolls = (roll for call in trace.calls if (roll := _roll(trace, call)) is not None)
    found_masks = (mask for call in trace.calls if (mask := _mask(trace, call)) is not None)
    rolls = grouped(found_rolls, lambda one: (one.side, one.shift))
    masks = grouped(found_masks, lambda one: (one.side, one.shift))
    for side, shift in {**rolls, **masks}:
        moved, masked = rolls.get((side, shift), []), masks.get((side, shift), [])
        largest = masked[0].window - 1 if masked else side // 2
        for other in [one for one in range(largest + 1) if one != shift][: _MOST_SHIFTS + 1]:
            of_rolls, of_masks = ([one.edits(other) for one in some] for some in (moved, masked))
            named = f"the rows and columns of Swin's windows by {shift}, as the reference does"
            if moved and masked:
                told = f"shift {named}; the port shifts them by {other}, and masks them so"
                yield _shifted("both", told, [*of_rolls, *of_masks])
            if moved and other:
                kept = ", with the reference's mask" if masked else ""
                yield _shifted("rolls", f"shift {named}; the port shifts them by {other}{kept}", of_rolls)
            if masked and other:
                told = f"mask windows that are shifted by {shift}, as the reference does; the mask is that of {other}"
                yield _shifted("mask", told, of_masks)


def _shifted(what: str, repair: str, edits: list[Edit]) -> Hypothesis:
    return Hypothesis("window", f"{what}: {repair}", repair, tuple(edits))


def _arguments(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shifts and dimensions of a roll."""
    amounts, dims = argument(call, 1, "shifts", ()), argument(call, 2, "dims", ())
    both = (tuple(one) if isinstance(one, (tuple, list)) else (one,) for one in (amounts, dims))
    return next(both), next(both)


def _roll(trace: Trace, call: Call) -> _Roll | None:
    if call.name != "roll" or len(call.inputs) != 1 or not trace.tensor(call.inputs[0]).is_floating_point():
        return None
    amounts, dims = _arguments(call)
    sizes = {trace.tensor(call.inputs[0]).shape[dim] for dim in dims}
    if len(dims) != 2 or len(amounts) != 2 or len(sizes) != 1 or len({abs(amount) for amount in amounts}) != 1:
        return None
    return _Roll(call, abs(amounts[0]), sizes.pop())


def _mask(trace: Trace, call: Call) -> _Mask | None:
    """Return the mask that a call adds, if it is one of shifted windows."""
    if (binary(call) or ("",))[0] != "add":
        return None
    for position, value in enumerate(call.inputs):
        found = _shift_of(trace.tensor(value)) if trace.tensor(value).is_floating_point() else None
        if found is not None:
            return _Mask(call, position, *found)
    return None


def _shift_of(table: Tensor) -> tuple[int, int, int] | None:
    """Return the grid's side, a window's side and the shift of a mask of shifted windows; None for other tables."""
    places = table.shape[-1] if table.dim() > 2 and table.shape[-1] == table.shape[-2] else 0
    windows = table.numel() // max(places**2, 1)
    window, count = math.isqrt(places), math.isqrt(windows)
    if window < 2 or window**2 != places or count < 2 or count**2 != windows:
        return None
    least = table.amin()
    hides = table == least
    if least >= 0.0 or not bool((hides | (table == 0.0)).all()):
        return None
    hides = hides.reshape(windows, places, places)
    for shift in range(1, window):
        if torch.equal(_apart(count * window, window, shift).to(hides.device), hides):
            return count * window, window, shift
    return None


def _apart(side: int, window: int, shift: int) -> Tensor:
    """Return which places of each window were not neighbours before the roll, ``[windows, places, places]``."""
    index = torch.arange(side)
    part = (index >= side - window).long() + (index >= side - shift).long()
    region = 3 * part[:, None] + part if shift else torch.zeros(side, side)
    cut = region.unflatten(0, (side // window, window)).unflatten(2, (side // window, window))
    places = cut.transpose(1, 2).reshape(-1, window**2)
    return places[:, :, None] != places[:, None]
