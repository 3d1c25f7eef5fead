"""Mistakes in attention: scale, heads, softcap, joined streams, sequence before batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.mistakes.alternatives import numbers, tunable
from parity.mistakes.attention import (
    Attention,
    Rearrange,
    attentions,
    distinct_heads,
    head_count_mistakes,
    heads_of,
    hidden_keys,
    traced_bias,
)
from parity.mistakes.hypothesis import (
    MOST_PLACES,
    Hypothesis,
    Mistake,
    ModuleCall,
    Row,
    at_each_scope,
    more_like_it,
    on_tensors,
    titled,
    to_be_bounded,
    with_attributes,
    within,
)
from parity.mistakes.masks import band_instead, hiding_too, mask_mistakes, seen_in
from parity.mistakes.usual_numbers import USUAL
from parity.trace.trace import (
    CASTS,
    JOINS,
    LINEAR,
    Call,
    Edit,
    Trace,
    Value,
    ancestors,
    edit,
    grouped,
    instead,
    users,
    with_number,
)

# What ports get wrong about attention: scale, mask, softcap, the order of heads.


_TES_HIDDEN_SCORE = -10000.0


def attention_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every known mistake that could have been made with the reference's attention."""
    found = attentions(trace)
    if not found:
        return
    alike = _masked_alike(trace, found)
    for some in alike if len(alike) > 1 else ():
        where = f" in {', '.join(one.call.module for one in some)}" if len(some) <= MOST_PLACES else " in some layers"
        mistakes: Iterator[Mistake[Attention]] = mask_mistakes(traced_bias(trace, some[0]))
        yield from at_each_scope(mistakes, some, where=where)
    if len(alike) == 2:
        yield from at_each_scope(_masks_of_others(trace, *alike), found, lambda one: one.call.module)
    first = found[0]  # the others are assumed to have the same sizes
    query, key, value = heads_of(trace, first)
    mistakes = chain(
        mask_mistakes(traced_bias(trace, first)),
        _hidden_scores(),
        _steps(query, key),
        _scales(first, query, value),
        _softmax(first),
        chain(_heads(query, key, value), head_count_mistakes(query, key, value)) if query.dim() == 4 else (),
    )
    yield from at_each_scope(mistakes, found, lambda one: one.call.module)


def score_cap_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield a missing cap of the reference's scores, for all that are capped alike."""
    for cap, alike in grouped(attentions(trace), lambda one: one.softcap).items():
        if math.isfinite(cap):
            yield from at_each_scope([_softcap(cap, math.inf)], alike)


def softmax_scale_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield the mistakes in the scale of the reference's scores, which a matched filter looks for."""
    found = attentions(trace)
    if found:
        query, _, value = heads_of(trace, found[0])
        yield from at_each_scope(_scales(found[0], query, value), found, lambda one: one.call.module)


def _masked_alike(trace: Trace, found: Sequence[Attention]) -> list[list[Attention]]:
    """Return attentions grouped by the band that their masks leave visible, for example those with a window."""

    def band(attention: Attention) -> Hashable:
        bias = traced_bias(trace, attention)
        return bias.shape[-1] == bias.shape[-2], seen_in(hidden_keys(bias))

    return list(grouped(found, band).values())


def _masks_of_others(
    trace: Trace, some: Sequence[Attention], others: Sequence[Attention]
) -> Iterator[Mistake[Attention]]:
    """Yield the mistake of exchanging the masks of two groups of layers, such as those with a window and the others."""
    masks = [traced_bias(trace, one[0]) for one in (some, others)]
    if masks[0].shape != masks[1].shape:
        return
    instead = [_mask_instead(mask) for mask in masks]
    if None not in instead:
        yield Mistake(
            "window",
            "mask of other layers",
            "give each layer the mask that the reference has there, with its window or without one; the port has that "
            "of the other layers",
            lambda attention: attention.edits(mask=instead[attention in some]),
        )


def _mask_instead(mask: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return what puts this mask in place of another; None if it is neither a band nor the same for all sequences."""
    seen = seen_in(hidden_keys(mask))
    if seen.band is not None:
        return band_instead(seen)
    shared = mask[:1]
    return (lambda bias: shared.to(bias).expand(bias.shape)) if bool((mask == shared).all()) else None


def _steps(query: Tensor, key: Tensor) -> Iterator[Mistake[Attention]]:
    """Yield keys and values that were written to a cache, or read from it, one position off."""
    if key.shape[-2] < 2:
        return
    right = "attend to keys and values of the reference's positions"
    for by, described in ((1, "the position before"), (-1, "the position after")):
        repair, moved = f"{right}; the port takes those of {described}", partial(torch.roll, shifts=by, dims=-2)
        yield Mistake("cache-step", f"keys and values of {described}", repair, _arranged(keys=moved))


def _hidden_scores() -> Iterator[Mistake[Attention]]:
    """Yield the finite score of hidden keys in TE's ``attention_mask_func`` (``utils.py``); others may be lower."""
    yield Mistake(
        "mask",
        f"hidden scores of {_TES_HIDDEN_SCORE:g}",
        f"keep scores far above {_TES_HIDDEN_SCORE:g}, which TE's unfused attention gives to hidden keys (normalise "
        "queries and keys, or take a fused backend, in 16 bits): here, some queries' other scores are lower, so they "
        "see hidden keys",
        with_attributes(hidden_score=_TES_HIDDEN_SCORE),
        adds=True,
    )


def _scales(attention: Attention, query: Tensor, value: Tensor) -> Iterator[Mistake[Attention]]:
    """Yield scales that a port may have in place of the reference's own."""
    head_dim, heads = query.shape[-1], query.shape[-3] if query.dim() > 3 else 1
    named = {
        "1 (missing)": 1.0,
        "1/sqrt(head_dim)": 1 / math.sqrt(head_dim),  # TE's default; small scores hardly tell the others from it
        "1/head_dim (or 1/sqrt(head_dim) twice)": 1 / head_dim,
        "1/sqrt(hidden)": 1 / math.sqrt(head_dim * heads),
    }
    if value.shape[-1] != head_dim:
        named["1/sqrt(head_dim of the values)"] = 1 / math.sqrt(value.shape[-1])
    layers = range(2, 5)
    named |= {
        f"1/(sqrt(head_dim) * {n}), as query-key layer scaling leaves it": 1 / math.sqrt(head_dim) / n for n in layers
    }
    right = attention.scale * attention.earlier_scale
    another = partial(_scale, right)
    for described, scale in named.items():
        yield replace(_scale(right, scale, described), value=scale, tuned=tunable(another))
    if not any(math.isclose(right**2, scale) for scale in named.values()):
        yield another(right**2, f"its square, {right**2:.4g}, as if both queries and scores were scaled")
    yield from numbers(another, [right], subtle=True)


def _say_scale(scale: float) -> str:
    """Return a scale, and as a formula if it is 1 over the root of a whole number: ``0.08839, 1/sqrt(128)``."""
    square = scale**-2 if scale > 0.0 else 0.0
    is_root = round(square) > 1 and math.isclose(square, round(square), rel_tol=1e-6)
    return f"{scale:.4g}{f', 1/sqrt({round(square)})' * is_root}"


def _scale(right: float, scale: float, described: str = "") -> Mistake[Attention]:
    number = f"{scale:.4g}"
    described = described or number
    told = described if number in described else f"{described}, {number}"

    def edits(attention: Attention) -> tuple[Edit, ...]:
        if math.isclose(scale, attention.scale * attention.earlier_scale, rel_tol=1e-4):
            return ()
        return attention.edits(scale=scale / attention.earlier_scale)

    return Mistake(
        "softmax-scale",
        f"softmax scale {described}",
        f"give TE softmax_scale={_say_scale(right)}, as the reference has; the port's is {told}",
        edits,
    )


def _softmax(attention: Attention) -> Iterator[Mistake[Attention]]:
    another = partial(_softcap, attention.softcap)
    yield another(math.inf)
    yield from numbers(another, [attention.softcap], USUAL.softcaps)
    if math.isfinite(attention.softcap):
        late = f"capped after it, hidden keys have the score {-attention.softcap:g} and are seen"
        repair = f"cap the scores before the mask hides keys; {late}"
        yield Mistake("softcap", "softcap after the mask", repair, with_attributes(hidden_score=-attention.softcap))
    if attention.sinks is None:
        repair = 'give TE softmax_type="vanilla"; the softmax of the port has one more term in the denominator'
        yield Mistake("softmax-sink", "softmax with a sink", repair, with_attributes(sink="zero"))
        return
    repair = 'give TE softmax_type="learnable" and map the sinks to its softmax_offset'
    other_heads = "give each head its own sink; the port has them in the reverse order of heads"
    sinks: dict[str, Row[Attention]] = {
        "sinks missing": (f"{repair}; its softmax has no sinks", with_attributes(sink="none")),
        "sinks in reverse": (other_heads, with_attributes(sink="reversed")),
        "sinks of score 0": (f"{repair}; its sinks have score 0", with_attributes(sink="zero")),
        "sinks negated": (f"{repair} as they are; the port negates them", with_attributes(sink="negated")),
    }
    yield from titled("softmax-sink", sinks)

    def times(factor: float) -> Mistake[Attention]:
        told = f"{repair} as they are; the port's are {factor:.4g} times that"
        return Mistake("softmax-sink", f"sinks times {factor:.4g}", told, with_attributes(sink_scale=factor))

    yield from numbers(times, [1.0], (attention.scale,))


def _softcap(right: float, cap: float) -> Mistake[Attention]:
    due = f"cap the scores as the reference does, softcap={right:g}"
    if math.isinf(right):
        due = "leave the scores uncapped as the reference does, softcap=0.0 in TE"
    name, wrong = ("missing", "caps none") if math.isinf(cap) else (f"{cap:.4g}", f"has {cap:.4g}")
    capped = with_attributes(softcap=cap)
    return Mistake("softcap", f"softcap {name}", f"{due}; the port {wrong}", capped, adds=math.isinf(right))


def _heads(query: Tensor, key: Tensor, value: Tensor) -> Iterator[Mistake[Attention]]:
    """Yield mistakes in the layout and the roles of query, key and value, ``[batch, heads, seq, head_dim]``."""
    heads = query.shape[1]
    groups = distinct_heads(key)
    if 1 < groups < heads:
        yield Mistake(
            "gqa-head-order",
            "keys and values repeated in another order",
            "repeat each group's keys and values for consecutive heads (repeat_interleave), as TE does; they are "
            "repeated as a whole (repeat)",
            _arranged(keys=lambda x: _tiled(x, heads, groups)),
        )
    moves: dict[str, Rearrange] = {
        "channel by channel": _channels_before_heads,
        "read channel by channel": _heads_before_channels,
        "heads not transposed back": _heads_taken_for_positions,
        "in reverse order": lambda x: x.flip(1),
        "moved by one": lambda x: x.roll(1, 1),
        "moved back by one": lambda x: x.roll(-1, 1),
    }
    if 1 < groups < heads:
        moves["by position in their group"] = lambda x: x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
        moves["by group"] = lambda x: x.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)
    right = "bring attention's result to [batch, seq, heads, head_dim] before the output projection"
    for described, move in moves.items() if heads > 1 else ():
        repair = f"{right}; the heads are {described}"
        yield Mistake("heads-permuted", f"context heads {described}", repair, _arranged(context=move))
    right = "bring queries, keys and values to heads as the reference does, [..., heads, head_dim]"
    for described, move in (
        ("channels before heads", _channels_before_heads),
        ("heads before channels", _heads_before_channels),
        ("view without transpose", _positions_taken_for_heads),
    ):
        name, repair = f"query, key and value {described}", f"{right}; they are reshaped as {described}"
        yield Mistake("heads-permuted", name, repair, _arranged(queries=move, keys=move))
    if query.shape == key.shape:
        yield Mistake(
            "query-key-swapped",
            "query and key exchanged",
            "swap the query and the key that TE is given",
            lambda one: one.edits(query=one.key, key=one.query, to_heads=tuple(one.to_heads[i] for i in (1, 0, 2))),
        )
    if key.shape == value.shape:
        yield Mistake(
            "key-value-swapped",
            "key and value exchanged",
            "swap the key and the value that TE is given",
            lambda one: one.edits(key=one.value, value=one.key, to_heads=tuple(one.to_heads[i] for i in (0, 2, 1))),
        )


def _tiled(x: Tensor, heads: int, groups: int) -> Tensor:
    """Return the groups repeated as a whole or, if they already are, each repeated for consecutive heads."""
    if x.shape[1] == groups:
        return x.repeat(1, heads // groups, 1, 1)
    if torch.equal(x[:, 0], x[:, 1]):
        return x[:, :: heads // groups].repeat(1, heads // groups, 1, 1)
    return x[:, :groups].repeat_interleave(heads // groups, 1)


def _channels_before_heads(x: Tensor) -> Tensor:
    """Return ``[batch, heads, seq, head_dim]`` read as if its rows were laid out as ``[head_dim, heads]``."""
    batch, heads, seq, head_dim = x.shape
    return x.permute(0, 2, 3, 1).reshape(batch, seq, heads, head_dim).transpose(1, 2)


def _heads_before_channels(x: Tensor) -> Tensor:
    """Return the inverse of ``_channels_before_heads``."""
    batch, heads, seq, head_dim = x.shape
    return x.transpose(1, 2).reshape(batch, seq, head_dim, heads).permute(0, 3, 1, 2)


def _heads_taken_for_positions(x: Tensor) -> Tensor:
    batch, heads, seq, head_dim = x.shape
    return x.reshape(batch, seq, heads, head_dim).transpose(1, 2)


def _positions_taken_for_heads(x: Tensor) -> Tensor:
    batch, heads, seq, head_dim = x.shape
    return x.transpose(1, 2).reshape(batch, heads, seq, head_dim)


def _arranged(
    queries: Rearrange | None = None, keys: Rearrange | None = None, context: Rearrange | None = None
) -> Callable[[Attention], Sequence[Edit]]:
    """Return the ``edits`` of a mistake that rearranges queries, keys and values, or the context."""
    return with_attributes(arrange=(queries, keys, keys, context))


# Mistakes in caps of activations by ``tanh``, such as Gemma's cap of its logits: another cap, none, or one too many.
#
# Caps of attention scores are covered above.


@dataclass(frozen=True, eq=False)
class Cap:
    """``call`` returns ``cap * tanh(x / cap)``, or ``x`` if ``cap`` is infinite."""

    call: Call
    x: Value
    cap: float

    def edits(self, cap: float) -> tuple[Edit, ...]:
        """Return the edits that apply another cap; empty if it is the same."""
        if math.isclose(cap, self.cap):
            return ()
        if self.x in self.call.outputs:
            return (edit(self.call, (), lambda was: _capped(was, cap)),)
        return (instead(self.call, (self.x,), lambda x: _capped(x, cap)),)


def softcap_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield other caps than the reference's; if it has none, caps of the last linear layer's result, the logits."""
    found = caps(trace)
    for right, alike in grouped(found or _uncapped(trace), lambda one: one.cap).items():
        another = partial(_cap_instead, right)
        mistakes = chain([another(math.inf)], numbers(another, [right], USUAL.softcaps))
        yield from at_each_scope(mistakes, alike, lambda one: one.call.module)


def caps(trace: Trace) -> list[Cap]:
    """Return every cap except those of attention scores, in order."""
    of_scores = {one.softcap for one in attentions(trace)}
    found = [cap for call in trace.calls if (cap := _cap(trace, call)) is not None]
    return [one for one in found if one.cap not in of_scores or not _meets_softmax(trace, one.call.outputs[0])]


def _cap(trace: Trace, call: Call) -> Cap | None:
    """Return the cap whose ``tanh`` is this call."""
    if call.name != "tanh" or len(call.inputs) != 1:
        return None
    match with_number(trace.producer(call.inputs[0])):
        case ("div", x, cap):
            pass
        case ("mul", x, inverse) if inverse > 0.0:
            cap = 1.0 / inverse
        case _:
            return None
    for user, _ in users(trace, call.outputs[0]):
        match with_number(user):
            case ("mul", _, factor) if math.isclose(factor, cap, rel_tol=1e-6) and cap > 0.0:
                return Cap(user, x, cap)
    return None


def _meets_softmax(trace: Trace, value: Value) -> bool:
    """Return whether a softmax reads the value, directly or through casts, sums, masks and reshapes."""
    through = CASTS | {"add", "masked_fill", "where", "view", "reshape"}
    return any(user.name == "softmax" for user, _ in users(trace, value, through))


def _uncapped(trace: Trace) -> list[Cap]:
    """Return the last product with a parameter, as an infinite cap."""
    made = [call for call in trace.calls if call.name in LINEAR and len(call.outputs) == 1]
    made = [call for call in made if any(trace.parameter(value) for value in call.inputs)]
    return [Cap(call, call.outputs[0], math.inf) for call in made[-1:]]


def _capped(x: Tensor, cap: float) -> Tensor:
    return x if math.isinf(cap) else cap * torch.tanh(to_be_bounded(x, cap) / cap)


def _cap_instead(right: float, cap: float) -> Mistake[Cap]:
    due = "leave activations uncapped" if math.isinf(right) else f"cap activations at {right:g} by tanh"
    name, wrong = "cap missing", "none are capped"
    if math.isfinite(cap):
        name, wrong = f"cap {cap:.4g}", f"they are capped at {cap:.4g}"
    told = f"{due}, as the reference does; {wrong}"
    return Mistake("softcap", name, told, lambda one: one.edits(cap), adds=math.isinf(right))


# Mistakes in attention to the joined keys of several streams: a stream does not see all of them.
#
# Streams are, for example, text and image in MMDiT and Flux, a prompt and its sequence, or a class token and patches.


_NEAR_A_KEY = 32  # a join of streams is looked for among this many of a key's ancestors
_MOST = 3  # attention to more streams is passed over

_Blocks = frozenset[tuple[int, int]]  # (i, j): queries of stream i do not see keys of stream j


@dataclass(frozen=True, eq=False)
class _Joined:
    """Attention to several streams.

    Attributes:
        attention: the attention to all of them.
        keys: how many keys each stream has, in order.
        queries: how many queries each stream has; a single number if they are not joined.
    """

    attention: Attention
    keys: tuple[int, ...]
    queries: tuple[int, ...]

    def edits(self, blocks: _Blocks) -> tuple[Edit, ...]:
        """Return the edits that hide the keys of some streams from the queries of some streams."""
        hidden = [(_slice(self.queries, query), _slice(self.keys, key)) for query, key in blocks]
        return self.attention.edits(mask=hiding_too(hidden))


def joined_stream_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield mistakes in which queries see only the keys of their own stream, or no query sees a stream's keys."""
    found = [joined for one in attentions(trace) if (joined := _joined(trace, one)) is not None]
    for (queries, keys), some in grouped(found, lambda one: (len(one.queries), len(one.keys))).items():
        yield from at_each_scope(_mistakes(queries, keys), some, lambda one: one.attention.call.module)


def _mistakes(queries: int, keys: int) -> Iterator[Mistake[_Joined]]:
    """Yield the mistakes for this many streams of keys, and for as many streams of queries or one."""
    others = {i: frozenset((i, j) for j in range(keys) if j != i) for i in range(queries if queries == keys else 0)}
    blocks: dict[str, _Blocks] = {}
    if others:
        blocks["the queries of each stream see only its own keys"] = _Blocks().union(*others.values())
    blocks |= {f"the queries of stream {i + 1} see only its own keys": own for i, own in others.items()}
    for i in range(keys):
        blocks[f"no query sees the keys of stream {i + 1}"] = _Blocks((query, i) for query in range(queries))
    right = "let queries see the keys of all streams that the reference joins, in its order"
    for described, some in blocks.items():
        yield Mistake("mask", described, f"{right}; in the port, {described}", with_attributes(blocks=some))


def _joined(trace: Trace, attention: Attention) -> _Joined | None:
    query, key, _ = heads_of(trace, attention)
    keys = _lengths(trace, attention.key, key.shape[-2])
    if keys is None or len(keys) > _MOST:
        return None
    queries = _lengths(trace, attention.query, query.shape[-2]) or ()
    return _Joined(attention, keys, queries if len(queries) == len(keys) else query.shape[-2:-1])


def _lengths(trace: Trace, value: Value, seq: int) -> tuple[int, ...] | None:
    """Return the lengths of the nearest joined streams that fill ``seq`` positions; None if there are none."""
    for made in (value, *ancestors(trace, value, _NEAR_A_KEY)):
        call = trace.producer(made)
        if call is not None and call.name in JOINS and len(call.inputs) > 1:
            shapes = [trace.tensor(part).shape for part in call.inputs]
            for axis in (i for i, size in enumerate(trace.tensor(made).shape[:-1]) if size == seq):
                lengths = tuple(shape[axis] for shape in shapes if len(shape) > axis)
                if len(lengths) == len(shapes) and sum(lengths) == seq:
                    return lengths
    return None


def _slice(lengths: tuple[int, ...], number: int) -> slice:
    ends = list(accumulate(lengths))
    return slice(ends[number] - lengths[number], ends[number])


# Tables of a fixed length, such as masks and cosines, for a sequence shorter than the reference's.
#
# TE makes its own mask and takes as much of a rotary table as it needs. A reference that is called with another
# sequence length, to see what such a port computes, may have a table for its own length only.


class ShorterTables(TorchFunctionMode):
    """Cut tables, within the context, to their first positions if they are too long for what they are applied to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if func is F.scaled_dot_product_attention:
                return func(**_shorter_mask(args, kwargs))
            return _with_shorter(func, args, kwargs)


def _with_shorter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with tables cut to its largest operand, or, if that fails, with a mask cut to the scores."""
    tensors = sorted((x for x in args if isinstance(x, Tensor)), key=lambda x: (x.dim(), x.numel()))
    whole = tensors[-1].shape if tensors else ()
    try:
        return func(*_shorter(args, whole), **kwargs)
    except RuntimeError:
        # These may be the scores of self-attention and their mask.
        if len(tensors) != 2 or any(x.dim() < 3 or x.shape[-1] != x.shape[-2] for x in tensors):
            raise
        return func(*_shorter(args, tensors[0].shape), **kwargs)


def _shorter(args: tuple[Any, ...], whole: Sequence[int]) -> list[Any]:
    return [_cut(x, whole) if isinstance(x, Tensor) else x for x in args]


def _shorter_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    if isinstance(given.get("attn_mask"), Tensor):
        scores = (*given["query"].shape[:-1], given["key"].shape[-2])
        given["attn_mask"] = _cut(given["attn_mask"], scores)
    return given


def _cut(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return as much of the tensor as broadcasts to the shape."""
    for dim in range(-min(x.dim(), len(shape)), 0):
        if 1 < shape[dim] < x.shape[dim]:
            x = x.narrow(dim, 0, shape[dim])
    return x


# Ports, or some of their layers, that take the batch dimension of activations for the sequence.


def sequence_first_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield the exchange of batch and sequence for the whole module, all submodules that attend, or one of these."""
    by_default = 'give TE attn_input_format="bshd" (qkv_format="bshd"), or ' if attentions(trace) else ""
    yield Hypothesis(
        "sequence-first",
        "batch and sequence exchanged",
        f"{by_default}transpose inputs and outputs: the port takes the first dimension for the sequence",
        around=_first_two_exchanged,
    )
    yield Hypothesis(
        "sequence-first",
        "batch and sequence viewed as each other",
        "transpose inputs and outputs where the port takes the first dimension for the sequence; they are reshaped",
        around=on_tensors(_view, _view_back),
    )
    levels = _attending(trace)
    for paths in levels:
        yield _exchanged_in(paths)
    for paths in levels:
        if 1 < len(paths) <= MOST_PLACES:
            yield from (replace(_exchanged_in((path,)), scope="one") for path in paths)


def _attending(trace: Trace) -> list[tuple[str, ...]]:
    """Return the submodules with one attention each, grouped by depth: attention itself, its layer, and so on."""
    found = list(dict.fromkeys(one.call.site[0] for one in attentions(trace) if one.call.site[0]))
    deepest = max((path.count(".") + 1 for path in found), default=0)
    levels = [
        tuple(dict.fromkeys(".".join(path.split(".")[:depth]) for path in found)) for depth in range(deepest, 0, -1)
    ]
    return list(dict.fromkeys(levels))


def _exchanged_in(paths: tuple[str, ...]) -> Hypothesis:
    """Return the mistake that these submodules take ``[batch, seq, ...]`` for ``[seq, batch, ...]``."""
    which = f"{paths[0]}{more_like_it(len(paths))}"

    @contextmanager
    def exchanged(module: nn.Module) -> Iterator[None]:
        with ExitStack() as hooks:
            for submodule in map(module.get_submodule, paths):
                hooks.enter_context(_exchanged_around(submodule))
            hooks.enter_context(ShorterTables())
            yield

    return Hypothesis(
        "sequence-first",
        f"batch and sequence exchanged in {which}",
        'give TE\'s layers attn_input_format="bshd", and its attention qkv_format="bshd": they take the first '
        f"dimension for the sequence by default; so {which} attends within the batch",
        around=within(exchanged),
    )


@contextmanager
def _exchanged_around(submodule: nn.Module) -> Iterator[None]:
    """Exchange, within the context, the first two dimensions of the activations that a submodule is given and returns.

    A port that takes the batch for the sequence makes masks and rotary tables of that length. So the submodule gets its
    other tensors only for the first sequence of the batch, cut to that length.
    """
    width: list[tuple[int, int]] = []

    def is_activation(x: Tensor) -> bool:
        return x.dim() > 1 and (x.dim(), x.shape[-1]) == width[-1]

    def given(x: Tensor) -> Tensor:
        if is_activation(x):
            return x.transpose(0, 1)
        return x[:1] if x.dim() > 1 else x

    def before(one: nn.Module, args: Any, kwargs: Any) -> Any:
        first = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        width.append((first.dim(), first.shape[-1] if first.dim() else 0))
        return tree_map_only(Tensor, given, (args, kwargs))

    def after(one: nn.Module, args: Any, result: Any) -> Any:
        exchanged = tree_map_only(Tensor, lambda x: _exchange(x) if is_activation(x) else x, result)
        width.pop()
        return exchanged

    hooks = submodule.register_forward_pre_hook(before, with_kwargs=True), submodule.register_forward_hook(after)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _exchange(x: Tensor) -> Tensor:
    return x.transpose(0, 1) if x.dim() > 1 else x


def _view(x: Tensor) -> Tensor:
    """Return ``[batch, seq, ...]`` viewed as ``[seq, batch, ...]``."""
    return x.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1) if x.dim() > 2 else x


def _view_back(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(x.shape) if x.dim() > 2 else x


def _first_two_exchanged(call: ModuleCall) -> ModuleCall:
    return on_tensors(_exchange, _exchange)(within(lambda module: ShorterTables())(call))
