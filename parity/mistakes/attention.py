"""Recognise attention in a trace: queries, keys, values, the number of heads, the mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from parity.mistakes.hypothesis import Mistake, to_be_bounded
from parity.numerics.blocked_attention import are_too_many_scores
from parity.numerics.errors import norm_of
from parity.numerics.golden import SDPA
from parity.trace.trace import (
    CASTS,
    RESHAPES,
    Call,
    Changed,
    Edit,
    Trace,
    Value,
    agree,
    ancestors,
    back,
    binary,
    instead,
    once_a_trace,
    users,
    with_number,
)

# The bias that is added to scores, and where it hides a key.


HIDDEN = -1e30
"""Added to the score of a hidden key. It is finite so that a query that sees no key weighs all keys alike; -inf would
give NaN."""

_HIDES = -5000.0
"""A key is hidden if at most this is added to its score, because no weight is left then. BERT's masks add -10,000,
which FP16 can hold; a bias by distance, which is not a mask, reaches this value only at 10,000 keys."""

Bias = Callable[[Tensor], Tensor]


def hidden_keys(bias: Tensor) -> Tensor:
    """Return where a bias hides a key."""
    return bias <= _HIDES


# Attention in a trace, whether called or written out: its queries, keys and values, its scale and its mask.


Rearrange = Callable[[Tensor], Tensor]

_OF_A_ROTATION = 16  # at most this many values lie between a rotation's argument and its result
_THROUGH = CASTS | {"dropout", "nan_to_num", "view", "reshape"}  # from probabilities to their product with values
_PAST_SINKS = _THROUGH | {"getitem"}  # the same, if sinks are cut off before


def as_it_is(x: Tensor) -> Tensor:
    """Return ``x``."""
    return x


@dataclass(frozen=True)
class Attention:
    """``softmax(scale * query key^T + bias) value``, with ``softcap * tanh(. / softcap)`` around the scores.

    Attributes:
        call: the last of the calls that compute it; returns the context.
        query, key: as they are passed to the call that makes the scores.
        value: as it is passed to ``call``.
        masks: the values that give the bias: the scores before and after each masking, or a mask, or nothing.
        added: a bias that ``baddbmm`` adds to the product of query and key, in addition to ``masks``.
        to_heads: functions that rearrange query, key and value to ``[..., heads, seq, head_dim]``.
        from_heads: rearranges the context from that layout to the one that ``call`` returns.
        scale: the factor of the scores in ``compute``.
        mask_scales: the factors of the scores after each masking, part of ``scale``.
        earlier_scale: the factor by which query and key were multiplied before.
        softcap: infinite for none.
        is_causal: whether scaled_dot_product_attention makes the mask itself.
        mask: maps the bias to what is added to the scores instead; None leaves it as it is.
        hidden_score: the score of hidden keys; None if it is far below all others.
        arrange: functions of query, key, value and context, in the layout of ``to_heads``; None leaves one as it is.
        sinks: scores of one more term of the softmax, ``[..., seq, 1]``, whose value is 0; None if there is none.
        sink: whether this term is the reference's ``own``, has the heads in ``reversed`` order, is ``negated``, has
            score ``zero``, or is left out (``none``).
        sink_scale: the factor by which the reference's own sinks are multiplied.
        since: the first query whose keys come from a cache; ``cached`` and ``slots`` apply from there on.
        cached: changes a key that comes from the cache; None leaves it as it is.
        slots: how many slots the cache has, if empty ones, which hold zeros, are seen; 0 if they are not.
    """

    call: Call
    query: Value
    key: Value
    value: Value
    masks: tuple[Value, ...]
    to_heads: tuple[Rearrange, ...] = (as_it_is,) * 3
    from_heads: Rearrange = as_it_is
    scale: float = 1.0
    earlier_scale: float = 1.0
    softcap: float = math.inf
    is_causal: bool = False
    mask: Bias | None = None
    hidden_score: float | None = None
    arrange: tuple[Rearrange | None, ...] = (None,) * 4
    added: tuple[Value, ...] = ()
    mask_scales: tuple[float, ...] = ()
    sinks: Value | None = None
    sink: Literal["own", "reversed", "negated", "zero", "none"] = "own"
    sink_scale: float = 1.0
    since: int = 0
    cached: Rearrange | None = None
    slots: int = 0

    @property
    def needs(self) -> tuple[Value, ...]:
        """The values that ``compute`` takes."""
        sinks = () if self.sinks is None else (self.sinks,)
        return (self.query, self.key, self.value, *self.masks, *self.added, *sinks)

    def compute(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
        """Return the context, in the layout in which the reference's last call returns it."""
        biases = others if self.sinks is None else others[:-1]
        arrange = [move or as_it_is for move in self.arrange]
        query, key, value = (
            move(to_heads(x)) for x, to_heads, move in zip((query, key, value), self.to_heads, arrange[:3], strict=True)
        )
        scores = self.scale * _scores(query, key)
        if self.cached is not None:
            scores = torch.where(self._of_cache(scores), self.scale * _scores(query, self.cached(key)), scores)
        if math.isfinite(self.softcap):
            scores = self.softcap * torch.tanh(to_be_bounded(scores, self.softcap) / self.softcap)
        bias = self.bias(scores, *biases)
        bias = bias if self.mask is None else self.mask(bias)
        scores = _in_batches_of(bias, scores) + bias
        if self.hidden_score is not None:
            scores = scores.masked_fill(hidden_keys(bias), self.hidden_score)
        if self.sink == "zero":
            scores = torch.cat((scores, torch.zeros_like(scores[..., :1])), -1)
        elif self.sink != "none" and self.sinks is not None:
            own = self.sink_scale * others[-1]
            scores = torch.cat((scores, {"own": own, "reversed": own.flip(-3), "negated": -own}[self.sink]), -1)
        if self.slots:
            scores = torch.cat((scores, self._empty_slots(scores)), -1)
        probabilities = scores.softmax(-1)[..., : key.shape[-2]]
        if self.mask is not None:  # TE's softmax is zero where nothing is seen
            probabilities = probabilities.masked_fill(hidden_keys(bias).all(-1, keepdim=True), 0.0)
        probabilities = _in_batches_of(value, probabilities)
        heads = probabilities.shape[-3] if probabilities.dim() > 3 else 0
        context = probabilities @ (_repeated(value, heads) if heads else value)
        return self.from_heads(arrange[3](context))

    def _of_cache(self, scores: Tensor) -> Tensor:
        """Return which keys come from the cache: those before a query's own, ``[queries, keys]``."""
        query, key = (torch.arange(size, device=scores.device) for size in scores.shape[-2:])
        return (key < query[:, None]) & (query[:, None] >= self.since)

    def _empty_slots(self, scores: Tensor) -> Tensor:
        """Return one score that weighs as much as all empty slots of the cache together, whose scores are 0."""
        query = torch.arange(scores.shape[-2], device=scores.device)
        empty = (self.slots - 1 - query).clamp(min=0).masked_fill(query < self.since, 0)
        return empty.to(scores.dtype).log()[:, None].clamp(min=HIDDEN).expand(*scores.shape[:-1], 1)

    def bias(self, scores: Tensor, *biases: Tensor) -> Tensor:
        """Return what is added to the scores, ``HIDDEN`` where a key is hidden; ``[..., seq_q, seq_kv]``.

        Args:
            scores: query times key.
            biases: the tensors of ``masks`` and ``added``.
        """
        masks, added = biases[: len(self.masks)], biases[len(self.masks) :]
        bias = torch.zeros_like(scores)
        if self.mask_scales:
            for before, after, scale in zip(masks[::2], masks[1::2], self.mask_scales, strict=True):
                difference = (after - before).detach().to(scores.dtype)
                shown = difference.isfinite() & (difference > HIDDEN / 2)
                bias = bias + _in_batches_of(bias, torch.where(shown, scale * (after - before), HIDDEN))
        elif masks and masks[0].dtype is torch.bool:
            bias = bias.masked_fill(~masks[0], HIDDEN)
        elif masks:
            bias = bias + masks[0].clamp(min=HIDDEN)
        for term in added:
            bias = bias + _in_batches_of(bias, term).clamp(min=HIDDEN)
        if self.is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            bias = bias.masked_fill(future, HIDDEN)
        return bias

    def edits(self, **changes: Any) -> tuple[Edit, ...]:
        """Return the edits that compute the attention with other attributes; empty if they are the same."""
        changed = replace(self, **changes)
        if changed == self:
            return ()
        return (instead(self.call, changed.needs, changed.compute, Changed(self, changes)),)

    def masked_by(self, bias: Bias) -> tuple[Edit, ...]:
        """Return the edits that apply ``bias`` to the reference's mask before it is added to the scores."""
        return self.edits(mask=bias)


@once_a_trace
def attentions(trace: Trace) -> list[Attention]:
    """Return every attention that the trace computes, in order."""
    return [attention for attention in seeming_attentions(trace) if _is_right(trace, attention)]


def seeming_attentions(trace: Trace) -> Iterator[Attention]:
    """Yield what looks like attention, in order, without the slow check that it computes the same numbers."""
    for call in trace.calls:
        attention = _called(trace, call) or _written_out(trace, call)
        if attention is not None:
            yield attention


@once_a_trace
def weighings(trace: Trace) -> list[Call]:
    """Return the calls by which softmax weighs values in a product, also in a form that is not recognised above."""
    return [call for call in trace.calls if _called(trace, call) is not None or _weighs_values(trace, call)]


def _weighs_values(trace: Trace, call: Call) -> bool:
    return call.name == "softmax" and _product_with_values(trace, call.outputs[0], _PAST_SINKS) is not None


def heads_of(trace: Trace, attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Return the traced query, key and value as ``[..., heads, seq, head_dim]``."""
    values = (attention.query, attention.key, attention.value)
    query, key, value = (to(trace.tensor(x)) for to, x in zip(attention.to_heads, values, strict=True))
    return query, key, value


def distinct_heads(key: Tensor) -> int:
    """Return how many heads of ``[batch, heads, seq, head_dim]`` differ, in whatever order they are repeated."""
    sums = key.double().abs().sum((0, 2, 3))
    return int(torch.unique((sums / sums.max()).mul(1e9).round()).numel())


def traced_bias(trace: Trace, attention: Attention) -> Tensor:
    """Return what the reference adds to the scores, as ``Attention.bias`` does."""
    query, key, _ = heads_of(trace, attention)
    return attention.bias(_scores(query, key), *map(trace.tensor, (*attention.masks, *attention.added)))


def _scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ (_repeated(key, query.shape[-3]) if query.dim() > 3 else key).transpose(-2, -1)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Return each group's keys or values repeated for its heads."""
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3)


def _in_batches_of(like: Tensor, x: Tensor) -> Tensor:
    """Return ``x`` with the leading dimensions of ``like`` if their sizes agree: batch and heads may be merged."""
    batches = like.shape[:-2]
    return x.reshape(*batches, *x.shape[-2:]) if math.prod(x.shape[:-2]) == math.prod(batches) else x


def _is_right(trace: Trace, attention: Attention) -> bool:
    try:
        computed = attention.compute(*map(trace.tensor, attention.needs))
    except (RuntimeError, IndexError):
        return False
    return agree(computed, trace.tensor(attention.call.outputs[0]))


def _called(trace: Trace, call: Call) -> Attention | None:
    if call.name != "scaled_dot_product_attention":
        return None
    given = SDPA.bind(*call.args, **call.kwargs)
    given.apply_defaults()
    query, key, value, mask, _, is_causal, scale, _ = given.arguments.values()
    if are_too_many_scores(trace.tensor(query), trace.tensor(key)):  # ``Attention`` holds all scores at once
        return None
    head_dim = trace.tensor(query).shape[-1]
    return Attention(
        call,
        query,
        key,
        value,
        (mask,) if mask is not None else (),
        scale=1 / math.sqrt(head_dim) if scale is None else scale,
        earlier_scale=_earlier_scale(trace, query) * _earlier_scale(trace, key),
        is_causal=is_causal,
    )


def _written_out(trace: Trace, call: Call) -> Attention | None:
    """Return the attention whose softmax is ``call``."""
    if call.name != "softmax" or not call.inputs:
        return None
    after, sinks = _scores_and_sinks(trace, call.inputs[0])
    path = _to_product(trace, after)
    context = _product_with_values(trace, call.outputs[0], _THROUGH if sinks is None else _PAST_SINKS)
    if path is None or context is None:
        return None
    context_call, value, to_value_heads, from_heads = context
    query, key, to_query_heads, to_key_heads, added = path.product
    return Attention(
        context_call,
        query,
        key,
        value,
        path.masks,
        (to_query_heads, to_key_heads, to_value_heads),
        from_heads,
        path.scale,
        _earlier_scale(trace, query) * _earlier_scale(trace, key),
        path.softcap,
        added=added,
        mask_scales=path.mask_scales,
        sinks=sinks,
    )


def _scores_and_sinks(trace: Trace, value: Value) -> tuple[Value, Value | None]:
    """Return the scores and the sinks joined in a softmax's argument; their maximum may have been subtracted."""
    joined = value
    match binary(trace.producer(value)):
        case ("sub", Value() as scores, Value() as most):
            largest = trace.producer(back(trace, most))
            joined = scores if largest is not None and largest.name in ("max", "amax") else value
    call = trace.producer(joined)
    if call is not None and call.name in ("cat", "concat") and len(call.inputs) == 2:
        scores, sinks = call.inputs
        if trace.tensor(sinks).shape[-1] == 1 < trace.tensor(scores).shape[-1]:
            return scores, sinks
    return value, None


_Product = tuple[Value, Value, Rearrange, Rearrange, tuple[Value, ...]]


@dataclass(frozen=True)
class _Path:
    """The way from query times key to a softmax's argument; attributes as in ``Attention``."""

    product: _Product
    masks: tuple[Value, ...]
    scale: float
    mask_scales: tuple[float, ...]
    softcap: float


def _to_product(trace: Trace, value: Value) -> _Path | None:
    """Return the path from query times key to a softmax's argument; None if there is none."""
    masks: tuple[Value, ...] = ()
    mask_scales: tuple[float, ...] = ()
    scale, softcap = 1.0, math.inf
    while True:
        call = trace.producer(value)
        if call is None:
            return None
        product = _product(trace, call)
        if product is not None:
            return _Path(product, masks, scale * call.kwargs.get("alpha", 1), mask_scales, softcap)
        if call.name in CASTS or call.name in ("view", "reshape"):
            value = _scores_among(trace, call)
            continue
        match binary(call), with_number(call):
            case _, ("mul", value, factor):
                scale *= factor
            case _, ("div", value, divisor):
                scale /= divisor
            case (("mul" | "div") as name, left, Value() as number), _ if trace.tensor(number).numel() == 1:
                factor = trace.tensor(number).item()
                value, scale = left, scale * (factor if name == "mul" else 1 / factor)
            case _ if call.name in ("add", "masked_fill", "sub") or (call.name == "where" and len(call.inputs) > 1):
                scores = _scores_among(trace, call)
                if masks and masks[0] == value:  # another masking follows at once; the two count as one
                    masks = (scores, *masks[1:])
                else:
                    masks, mask_scales = (scores, value, *masks), (scale, *mask_scales)
                value = scores
            case _ if call.name == "tanh":
                value, softcap = call.inputs[0], scale
            case _:
                return None


def _scores_among(trace: Trace, call: Call) -> Value:
    """Return the argument of a call that is computed from a product."""
    for value in call.inputs:
        queue, seen = [value], 0
        while queue and seen < 16:
            producer = trace.producer(queue.pop(0))
            seen += 1
            if producer is None:
                continue
            if _product(trace, producer) is not None:
                return value
            queue += producer.inputs
    return call.inputs[0]


def _product(trace: Trace, call: Call) -> _Product | None:
    """Return query and key, how each becomes ``[..., heads, seq, head_dim]``, and a mask that is added at once."""
    named = binary(call)
    if named is not None and named[0] == "matmul":
        return named[1], named[2], as_it_is, _last_two_exchanged, ()
    if call.name == "baddbmm" and len(call.inputs) == 3:
        added = call.inputs[:1] if call.kwargs.get("beta", 1) else []
        return call.inputs[1], call.inputs[2], as_it_is, _last_two_exchanged, tuple(added)
    letters = _einsum(call)
    if letters is None:
        return None
    left, right, result = letters
    summed = [letter for letter in left if letter in right and letter not in result]
    if len(result) < 3 or len(summed) != 1 or result[-2] not in left or result[-1] not in right:
        return None
    *batch, of_query, of_key = list(result)
    return (
        call.inputs[0],
        call.inputs[1],
        _permuted(left, [*batch, of_query, *summed]),
        _permuted(right, [*batch, of_key, *summed]),
        (),
    )


def _product_with_values(
    trace: Trace, probabilities: Value, names: Collection[str]
) -> tuple[Call, Value, Rearrange, Rearrange] | None:
    """Return the call that multiplies probabilities by values, the values, and the layouts of both."""
    for call, given in users(trace, probabilities, names):
        named = binary(call)
        if named is not None and named[0] == "matmul" and named[1] == given:
            return call, named[2], as_it_is, as_it_is
        letters = _einsum(call)
        if letters is not None and call.inputs[0] == given:
            left, right, result = letters
            *batch, of_query, of_key = list(left)
            channel = next(letter for letter in right if letter not in left)
            heads_first = [*batch, of_query, channel]
            return call, call.inputs[1], _permuted(right, [*batch, of_key, channel]), _permuted(heads_first, result)
    return None


def _einsum(call: Call) -> tuple[str, str, str] | None:
    if call.name != "einsum" or len(call.inputs) != 2 or not isinstance(call.args[0], str):
        return None
    operands, arrow, result = call.args[0].replace(" ", "").partition("->")
    left, comma, right = operands.partition(",")
    return (left, right, result) if arrow and comma and "." not in operands else None


def _permuted(letters: Any, wanted: Any) -> Rearrange:
    order = [list(letters).index(letter) for letter in wanted] if set(wanted) <= set(letters) else []
    return lambda x: x.permute(order)


def _last_two_exchanged(x: Tensor) -> Tensor:
    return x.transpose(-2, -1)


def _earlier_scale(trace: Trace, value: Value) -> float:
    """Return the number by which a query or key was multiplied before attention; 1 if there is none.

    A rotation may have followed; it keeps the norm.
    """
    moved = back(trace, value, RESHAPES)
    size = norm_of(trace.tensor(moved))
    for made in (moved, *ancestors(trace, moved, _OF_A_ROTATION)):
        x = trace.tensor(made)
        match with_number(trace.producer(made)):
            case ("mul" | "div" as name, _, number) if made == moved or (
                x.is_floating_point() and math.isclose(norm_of(x), size, rel_tol=1e-6)
            ):
                return number if name == "mul" else 1 / number
    return 1.0


# Attention with another number of heads: the weights have the same shapes, so nothing else shows the mistake.


_MOST = 8  # try at most this many other numbers of heads
_SMALLEST, _LARGEST = 4, 512  # channels of a head


def head_count_mistakes(query: Tensor, key: Tensor, value: Tensor) -> Iterator[Mistake[Attention]]:
    """Yield the likeliest other numbers of heads with the same total width, and with groups in proportion.

    TE then scales by the root of the new head's width. Rotations stay as they are, so ports with rotary embeddings,
    which rotate the reference's channels, are not covered.

    Args:
        query, key, value: ``[batch, heads, seq, head_dim]``, keys and values repeated for all heads or not.
    """
    heads, head_dim = query.shape[1], query.shape[-1]
    groups = distinct_heads(key)
    if value.shape[-1] != head_dim or heads % groups or key.shape[1] not in (groups, heads):
        return
    width = heads * head_dim
    others = [n for n in range(1, width + 1) if n != heads and width % n == 0 and groups * n % heads == 0]
    fitting = [n for n in others if _SMALLEST <= width // n <= _LARGEST]
    for count in sorted(fitting, key=lambda n: abs(math.log(n / heads)))[:_MOST]:
        yield Mistake(
            "head-count",
            f"{count} heads",
            f"give TE num_attention_heads={heads}, as the reference has; the port has {count}, of "
            f"{width // count} channels",
            partial(_with_heads, count, heads, groups, width),
        )


def _with_heads(count: int, heads: int, groups: int, width: int, attention: Attention) -> tuple[Edit, ...]:
    keys = _split(count * groups // heads, distinct=groups)
    arrange = (_split(count), keys, keys, _split(heads))
    return attention.edits(arrange=arrange, scale=math.sqrt(count / width) / attention.earlier_scale)


def _split(count: int, distinct: int = 0) -> Rearrange:
    """Return a rearrangement of ``[batch, heads, seq, head_dim]`` into another number of heads with the same channels.

    Args:
        count: the other number of heads.
        distinct: how many heads differ, if each may be repeated for consecutive heads; 0 if all differ.
    """

    def split(x: Tensor) -> Tensor:
        x = x[:, :: x.shape[1] // distinct] if distinct else x
        return x.transpose(1, 2).flatten(2).unflatten(2, (count, -1)).transpose(1, 2)

    return split
