"""Sequences that a reference attends to one by one, and puts one after the other; ports attend to them at once.

TE's format ``thd`` takes all of them with their borders, ``cu_seqlens``. To say what a port with other borders
computes, queries, keys and values of all sequences are attended with at once behind a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parity.diagnosis.attention.attention import Attention, attentions
from parity.diagnosis.attention.masks import HIDDEN, Bias
from parity.diagnosis.attention.segments import segment_mistakes
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import everywhere_and_somewhere
from parity.diagnosis.walk import RESHAPES
from parity.watching.trace import Call, Edit, Trace, Value, edit, once_a_trace

_JOINS = frozenset({"cat", "concat", "concatenate"})
_ONE_SEQUENCE = frozenset({"getitem", "select"})  # out of a batch of one
_PADS = frozenset({"pad"})


@dataclass(frozen=True, eq=False)
class Packed:
    """Attention to sequences one by one.

    Attributes:
        call: joins their contexts.
        parts: the attention to each sequence.
        layouts: the calls between each context and what is joined.
        bias: what is added to the scores of all queries and keys, ``HIDDEN`` where they are of different sequences.
    """

    call: Call
    parts: tuple[Attention, ...]
    layouts: tuple[tuple[Call, ...], ...]
    bias: Tensor

    def edits(self, mask: Bias) -> tuple[Edit, ...]:
        """All sequences are attended to at once behind another mask."""
        needs = [value for part in self.parts for value in part.needs]

        def compute(was: Tensor, *values: Tensor) -> Tensor:
            return self._joined(mask, values).to(was.dtype)

        return (edit(self.call, needs, compute),)

    def _joined(self, mask: Bias, values: tuple[Tensor, ...]) -> Tensor:
        given = iter(values)
        heads = [[next(given) for _ in part.needs][:3] for part in self.parts]
        by_part = [
            [to_heads(x) for to_heads, x in zip(part.to_heads, of_part, strict=True)]
            for part, of_part in zip(self.parts, heads, strict=True)
        ]
        query, key, value = (torch.cat(some, -2) for some in zip(*by_part, strict=True))
        at_once = replace(
            self.parts[0],
            masks=self.parts[0].needs[:1],  # stands for the bias, which is given
            mask_scales=(),
            added=(),
            is_causal=False,
            mask=mask,
            to_heads=(_as_it_is,) * 3,
            from_heads=_as_it_is,
        )
        context = at_once.compute(query, key, value, self.bias.to(query))
        parts = context.split([part[0].shape[-2] for part in by_part], -2)
        laid_out = [
            _replayed(part.from_heads(x), layout)
            for part, x, layout in zip(self.parts, parts, self.layouts, strict=True)
        ]
        joined: Tensor = self.call.function(laid_out, *self.call.args[1:], **self.call.kwargs)
        return joined


@once_a_trace
def packed_attentions(trace: Trace) -> list[Packed]:
    """Every attention to sequences one by one, in order."""
    made = {one.call.outputs[0].number: one for one in attentions(trace) if one.sinks is None}
    return [packed for call in trace.calls if (packed := _packed(trace, call, made)) is not None] if made else []


def packed_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with the borders of the reference's sequences."""
    found = packed_attentions(trace)
    if found:
        mistakes = [mistake.made_by(_edits_of) for mistake in segment_mistakes(found[0].bias)]
        yield from everywhere_and_somewhere(mistakes, found, module, lambda one: one.call.module)


def _edits_of(bias: Bias) -> Callable[[Packed], Sequence[Edit]]:
    return lambda one: one.edits(bias)


def _packed(trace: Trace, call: Call, made: dict[int, Attention]) -> Packed | None:
    if call.name not in _JOINS or len(call.inputs) < 2 or not isinstance(call.args[0], (tuple, list)):
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


def _own_bias(trace: Trace, part: Attention) -> Tensor:
    """``[queries, keys]``, of the first head."""
    query, key = (to(trace.tensor(x)) for to, x in zip(part.to_heads[:2], (part.query, part.key), strict=True))
    like = query.new_zeros(*query.shape[:-1], key.shape[-2])
    bias = part.bias(like, *map(trace.tensor, (*part.masks, *part.added)))
    return bias[(0,) * (bias.dim() - 2)]


def _way(trace: Trace, value: Value, made: dict[int, Attention]) -> tuple[Attention, tuple[Call, ...]] | None:
    """The attention that made a value, and the calls in between, which change its layout alone, or pad it."""
    calls: list[Call] = []
    while value.number not in made:
        call = trace.producer(value)
        if call is None or len(call.inputs) != 1 or not _lays_out(trace, call):
            return None
        calls.append(call)
        value = call.inputs[0]
    return made[value.number], tuple(reversed(calls))


def _lays_out(trace: Trace, call: Call) -> bool:
    """Whether it changes the layout of what it is given, or adds padding to it, and leaves nothing out."""
    if call.name in _ONE_SEQUENCE:
        return trace.tensor(call.inputs[0]).numel() == trace.tensor(call.outputs[0]).numel()
    return call.name in RESHAPES | _PADS


def _replayed(x: Tensor, calls: tuple[Call, ...]) -> Tensor:
    for call in calls:
        given = partial(_second, other=x)
        args, kwargs = tree_map_only(Value, given, (call.args, call.kwargs))
        x = call.function(*args, **kwargs)
    return x


def _second(one: Value, other: Tensor) -> Tensor:
    return other


def _as_it_is(x: Any) -> Any:
    return x
