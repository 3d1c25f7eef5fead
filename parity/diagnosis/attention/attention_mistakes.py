"""What ports get wrong about attention: scale, mask, softcap, the order of heads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from parity.diagnosis.attention.attention import Attention, Rearrange, attentions, distinct_heads, heads_of, traced_bias
from parity.diagnosis.attention.head_counts import head_count_mistakes
from parity.diagnosis.attention.masks import band_of, hidden_keys, mask_mistakes
from parity.diagnosis.attention.segments import segment_mistakes
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import MOST_PLACES, Mistake, everywhere_and_somewhere
from parity.watching.trace import Edit, Trace

USUAL_CAPS = (30.0, 50.0)
"""Gemma 2's of logits and of scores."""

_NEAR = (0.9, 1.1)  # times the reference's number; no known mistakes: from one of them the port's own is looked for

_TES_HIDDEN_SCORE = -10000.0


def attention_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with the reference's attention."""
    found = attentions(trace)
    if not found:
        return
    alike = _masked_alike(trace, found)
    for some in alike if len(alike) > 1 else ():
        where = f" in {', '.join(one.call.module for one in some)}" if len(some) <= MOST_PLACES else " in some layers"
        mistakes = _masks(traced_bias(trace, some[0]))
        yield from everywhere_and_somewhere(mistakes, some, module, where=where)
    if len(alike) == 2:
        yield from everywhere_and_somewhere(_masks_of_others(trace, *alike), found, module, lambda one: one.call.module)
    first = found[0]  # sizes of the others are taken to be like it
    query, key, value = heads_of(trace, first)
    mistakes = chain(
        _masks(traced_bias(trace, first)),
        _hidden_scores(),
        _steps(query, key),
        _scales(first, query, value),
        _softmax(first),
        chain(_heads(query, key, value), head_count_mistakes(query, key, value)) if query.dim() == 4 else (),
    )
    yield from everywhere_and_somewhere(mistakes, found, module, lambda one: one.call.module)


def _masked_alike(trace: Trace, found: Sequence[Attention]) -> list[list[Attention]]:
    """Attentions whose masks leave the same band visible, such as those with a window, and those to an encoder."""
    alike: dict[tuple[object, ...], list[Attention]] = defaultdict(list)
    for attention in found:
        bias = traced_bias(trace, attention)
        band, is_padded = band_of(hidden_keys(bias))
        alike[bias.shape[-1] == bias.shape[-2], band, is_padded].append(attention)
    return list(alike.values())


def _masks_of_others(
    trace: Trace, some: Sequence[Attention], others: Sequence[Attention]
) -> Iterator[Mistake[Attention]]:
    """That layers with a window, and those without one, or with another, have each other's mask."""
    masks = [traced_bias(trace, one[0]) for one in (some, others)]
    if masks[0].shape != masks[1].shape or any(not bool((mask == mask[:1]).all()) for mask in masks):
        return

    def edits(attention: Attention) -> tuple[Edit, ...]:
        of_others = masks[attention in some][:1]
        return attention.edits(mask=lambda bias: of_others.to(bias).expand(bias.shape))

    yield Mistake(
        "window",
        "mask of other layers",
        "give each layer the mask that the reference has there, with its window or without one; it has that of the "
        "other layers",
        edits,
    )


def _masks(bias: Tensor) -> Iterator[Mistake[Attention]]:
    for mistake in chain(mask_mistakes(bias), segment_mistakes(bias)):
        yield mistake.made_by(lambda bias: _with(mask=bias))


def _steps(query: Tensor, key: Tensor) -> Iterator[Mistake[Attention]]:
    """Keys and values that were written to a cache, or read from it, one position off."""
    if key.shape[-2] < 2:
        return
    for by, described in ((1, "the position before"), (-1, "the position after")):
        yield Mistake(
            "cache-step",
            f"keys and values of {described}",
            f"attend to keys and values of the reference's positions; each is that of {described}",
            _arranged(keys=lambda x, by=by: x.roll(by, -2)),  # type: ignore[misc]
        )


def _hidden_scores() -> Iterator[Mistake[Attention]]:
    """Keys hidden by a score that others may be below: TE's ``attention_mask_func`` (``pytorch/utils.py``)."""
    yield Mistake(
        "mask",
        f"hidden scores of {_TES_HIDDEN_SCORE:g}",
        f"keep scores far above {_TES_HIDDEN_SCORE:g}, which TE's unfused attention gives to hidden keys (normalise "
        "queries and keys, or take a fused backend, in 16 bits): here a query's other scores are below, and it sees "
        "what is hidden",
        _with(hidden_score=_TES_HIDDEN_SCORE),
    )


def _scales(attention: Attention, query: Tensor, value: Tensor) -> Iterator[Mistake[Attention]]:
    """Scales that stand in the place of the reference's own."""
    head_dim, heads = query.shape[-1], query.shape[-3] if query.dim() > 3 else 1
    named = {
        "1 (missing)": 1.0,
        "1/head_dim (or 1/sqrt(head_dim) twice)": 1 / head_dim,
        "1/sqrt(head_dim)": 1 / math.sqrt(head_dim),
        "1/sqrt(hidden)": 1 / math.sqrt(head_dim * heads),
    }
    if value.shape[-1] != head_dim:
        named["1/sqrt(head_dim of the values)"] = 1 / math.sqrt(value.shape[-1])
    layers = range(2, 5)
    named |= {
        f"1/(sqrt(head_dim) * {n}), as query-key layer scaling leaves it": 1 / math.sqrt(head_dim) / n for n in layers
    }
    right = attention.scale * attention.earlier_scale
    for described, scale in named.items():
        yield _scale(right, scale, described)
    for factor in _NEAR:
        yield _scale(right, factor * right)


def _scale(right: float, scale: float, described: str = "") -> Mistake[Attention]:
    described = described or f"{scale:.4g}"

    def edits(attention: Attention) -> tuple[Edit, ...]:
        if math.isclose(scale, attention.scale * attention.earlier_scale, rel_tol=1e-4):
            return ()
        return attention.edits(scale=scale / attention.earlier_scale)

    return Mistake(
        "softmax-scale",
        f"softmax scale {described}",
        f"give TE softmax_scale={right:.4g}, as the reference has; it is {described}",
        edits,
        value=scale,
        tuned=partial(_scale, right),
    )


def _softmax(attention: Attention) -> Iterator[Mistake[Attention]]:
    near = tuple(factor * attention.softcap for factor in _NEAR) if math.isfinite(attention.softcap) else USUAL_CAPS
    yield from map(_softcap_of(attention.softcap), (math.inf, *near))
    if attention.sinks is None:
        yield Mistake(
            "softmax-sink",
            "softmax with a sink",
            'give TE softmax_type="vanilla"; its softmax has one more term in the denominator',
            _with(sink="zero"),
        )
        return
    repair = 'give TE softmax_type="learnable" and map the sinks to its softmax_offset'
    yield Mistake("softmax-sink", "sinks missing", f"{repair}; its softmax has no sinks", _with(sink="none"))
    yield Mistake("softmax-sink", "sinks of score 0", f"{repair}; its sinks have score 0", _with(sink="zero"))


def _to_be_capped(right: float) -> str:
    if math.isinf(right):
        return "leave the scores uncapped as the reference does, softcap=0.0 in TE"
    return f"cap the scores as the reference does, softcap={right:g}"


def _softcap_of(right: float) -> Callable[[float], Mistake[Attention]]:
    def softcap(cap: float) -> Mistake[Attention]:
        return Mistake(
            "softcap",
            "softcap missing" if math.isinf(cap) else f"softcap {cap:.4g}",
            f"{_to_be_capped(right)}; {'it caps none' if math.isinf(cap) else f'it has {cap:.4g}'}",
            _with(softcap=cap),
            value=cap if math.isfinite(cap) else None,
            tuned=softcap,
        )

    return softcap


def _heads(query: Tensor, key: Tensor, value: Tensor) -> Iterator[Mistake[Attention]]:
    """Heads and channels that are taken for each other, in ``[batch, heads, seq, head_dim]``."""
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
    for described, move in moves.items() if heads > 1 else ():
        yield Mistake(
            "heads-permuted",
            f"context heads {described}",
            f"bring attention's result to [batch, seq, heads, head_dim] before the output projection; the heads are "
            f"{described}",
            _arranged(context=move),
        )
    for described, move in (
        ("channels before heads", _channels_before_heads),
        ("heads before channels", _heads_before_channels),
        ("view without transpose", _positions_taken_for_heads),
    ):
        yield Mistake(
            "heads-permuted",
            f"query, key and value {described}",
            "bring queries, keys and values to heads as the reference does, [..., heads, head_dim]; they are "
            f"reshaped as {described}",
            _arranged(queries=move, keys=move),
        )
    if query.shape == key.shape:
        yield Mistake(
            "query-key-swapped",
            "query and key exchanged",
            "exchange TE's query and key",
            lambda one: one.edits(query=one.key, key=one.query, to_heads=tuple(one.to_heads[i] for i in (1, 0, 2))),
        )
    if key.shape == value.shape:
        yield Mistake(
            "key-value-swapped",
            "key and value exchanged",
            "exchange TE's key and value",
            lambda one: one.edits(key=one.value, value=one.key, to_heads=tuple(one.to_heads[i] for i in (0, 2, 1))),
        )


def _tiled(x: Tensor, heads: int, groups: int) -> Tensor:
    """Groups repeated as a whole; where they are so already, each for consecutive heads."""
    if x.shape[1] == groups:
        return x.repeat(1, heads // groups, 1, 1)
    if torch.equal(x[:, 0], x[:, 1]):
        return x[:, :: heads // groups].repeat(1, heads // groups, 1, 1)
    return x[:, :groups].repeat_interleave(heads // groups, 1)


def _channels_before_heads(x: Tensor) -> Tensor:
    """``[batch, heads, seq, head_dim]`` whose rows were laid out as ``[head_dim, heads]``."""
    batch, heads, seq, head_dim = x.shape
    return x.permute(0, 2, 3, 1).reshape(batch, seq, heads, head_dim).transpose(1, 2)


def _heads_before_channels(x: Tensor) -> Tensor:
    """The inverse of ``_channels_before_heads``."""
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
) -> Callable[[Attention], tuple[Edit, ...]]:
    """Other layouts of queries, of keys and values, of the context."""
    return lambda one: one.edits(arrange=(queries, keys, keys, context))


def _with(**changes: object) -> Callable[[Attention], tuple[Edit, ...]]:
    return lambda attention: attention.edits(**changes)
