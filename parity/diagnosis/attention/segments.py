"""Masks of several sequences in one: each token sees its own sequence, and often only what came before.

Packed sequences, documents and chunks are such masks. A prefix that all see, or padding before a sequence, is a mask
that is no band either; ports have the causal mask in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from parity.diagnosis.attention.masks import HIDDEN, Bias, MaskMistake, band_of, hidden_keys, without_hiding
from parity.golden.band import Band, distance_of

_FEW_BORDERS = 8  # of which each is tried elsewhere


def segment_mistakes(bias: Tensor) -> Iterator[MaskMistake]:
    """What ports make of a mask that is no band.

    Args:
        bias: what the reference adds to its scores, ``[..., queries, keys]``; at most ``HIDDEN`` where a key is hidden.
    """
    hidden = hidden_keys(bias)
    if band_of(hidden)[0] is not None or not bool(hidden.any()):
        return
    yield MaskMistake(
        "mask",
        "causal mask alone",
        'give TE the reference\'s mask, attn_mask_type="arbitrary" and attention_mask (True means hidden); it has the '
        "causal one alone",
        _instead(_future),
    )
    lengths = lengths_of(hidden)
    if lengths is not None:
        yield from _other_segments(lengths, bool((hidden | ~_future(hidden)).all()))
    if bool(_padded_before(hidden).any()):
        yield MaskMistake(
            "padding-mask",
            "padding before sequences taken for padding after them",
            'give TE the reference\'s mask, attn_mask_type="arbitrary" and attention_mask (True means hidden); it '
            "takes padding to follow a sequence, and counts as many tokens from the first",
            _as_padded_after,
        )


def _other_segments(lengths: Sequence[int], is_causal: bool) -> Iterator[MaskMistake]:
    borders = [0, *accumulate(lengths)]
    right = f"give TE the reference's sequences, cu_seqlens={borders} in format thd, or its mask as an arbitrary one"

    def of_lengths(name: str, other: Sequence[int], causal: bool = is_causal) -> MaskMistake:
        return MaskMistake("mask", name, f"{right}; it has {name}", _segments_instead(other, causal))

    yield of_lengths("one sequence, across all borders", [sum(lengths)])
    other_way = f"sequences that are {'not ' if is_causal else ''}causal"
    yield of_lengths(other_way, lengths, not is_causal)
    orders = {"in reverse order": lengths[::-1], "shortest first": sorted(lengths)}
    orders["longest first"] = orders["shortest first"][::-1]
    if sum(lengths) % len(lengths) == 0:
        orders["made equal"] = [sum(lengths) // len(lengths)] * len(lengths)
    for by in (-1, 1):  # every border but the two ends
        if lengths[0] + by > 0 and lengths[-1] - by > 0:
            orders[f"with every border moved by {by:+d}"] = [lengths[0] + by, *lengths[1:-1], lengths[-1] - by]
    for described, order in orders.items():
        if list(order) != list(lengths):
            yield of_lengths(f"the sequences' lengths {described}", order)
    if len(lengths) <= _FEW_BORDERS:
        for number, (before, after) in enumerate(pairwise(lengths), 1):
            around = list(lengths[: number - 1]), list(lengths[number + 1 :])
            yield of_lengths(f"no border before sequence {number}", [*around[0], before + after, *around[1]])
            for by in (-1, 1):
                if before + by > 0 and after - by > 0:
                    moved = [*around[0], before + by, after - by, *around[1]]
                    yield of_lengths(f"sequence {number} beginning at {sum(moved[:number])}", moved)
    if is_causal:
        yield _window_instead(max(lengths) - 1, right)


def is_of_sequences(hidden: Tensor) -> bool:
    """Whether a mask ``[..., seq, seq]`` is causal, in one sequence or in several."""
    return torch.equal(_future(hidden).expand_as(hidden), hidden) or (
        lengths_of(hidden) is not None and bool((hidden | ~_future(hidden)).all())
    )


def sequences_instead(lengths: Sequence[int]) -> Bias:
    """A causal mask in sequences of these lengths, in the place of another."""
    return _segments_instead(lengths, True)


def _window_instead(size: float, right: str) -> MaskMistake:
    left = max(round(size), 1)
    return MaskMistake(
        "window",
        f"window of {left}, not sequences",
        f"{right}; it has a window of {left} keys before the query's own",
        _instead(lambda like: Band(left, 0).hidden(range(like.shape[-2]), range(like.shape[-1]), like.device)),
        size,
        lambda other: _window_instead(other, right),
    )


def lengths_of(hidden: Tensor) -> list[int] | None:
    """Of the sequences in which a mask ``[..., seq, seq]`` is whole or causal; None if it is no such mask."""
    seq = hidden.shape[-1]
    if hidden.shape[-2] != seq or seq < 2 or not bool((hidden == hidden[(0,) * (hidden.dim() - 2)]).all()):
        return None
    one = hidden[(0,) * (hidden.dim() - 2)]
    starts = [0, *(1 + i for i in range(seq - 1) if bool(one[i + 1, i]))]
    lengths = [after - before for before, after in pairwise([*starts, seq])]
    apart = _between(lengths, one)
    is_it = torch.equal(apart, one) or torch.equal(apart | _future(one), one)
    return lengths if is_it and len(lengths) > 1 else None


def _between(lengths: Sequence[int], like: Tensor) -> Tensor:
    """Where query and key are of different sequences, ``[seq, seq]``."""
    number = torch.arange(len(lengths), device=like.device).repeat_interleave(
        torch.tensor(lengths, device=like.device), output_size=sum(lengths)
    )
    return number[:, None] != number


def _future(like: Tensor) -> Tensor:
    """Keys that come later, ``[queries, keys]``."""
    return distance_of(range(like.shape[-2]), range(like.shape[-1]), like.device) > 0


def _padded_before(hidden: Tensor) -> Tensor:
    """Keys before the first one that the last query sees, ``[..., keys]``."""
    return (~hidden[..., -1, :]).cumsum(-1) == 0


def _as_padded_after(bias: Tensor) -> Tensor:
    hidden = hidden_keys(bias)
    seen = (~_padded_before(hidden)).sum(-1)[..., None, None]
    queries, keys = (torch.arange(count, device=bias.device) for count in bias.shape[-2:])
    is_causal = bool((hidden | ~_future(hidden)).all())
    beyond = (queries[:, None] >= seen) | (keys >= seen)
    return without_hiding(bias).masked_fill(beyond | _future(hidden) if is_causal else beyond, HIDDEN)


def _instead(other: Callable[[Tensor], Tensor]) -> Bias:
    """What ``other`` makes of the bias is hidden, and nothing else."""
    return lambda bias: without_hiding(bias).masked_fill(other(bias), HIDDEN)


def _segments_instead(lengths: Sequence[int], is_causal: bool) -> Bias:
    def instead(bias: Tensor) -> Tensor:
        if bias.shape[-2:] != (sum(lengths), sum(lengths)):
            return bias
        apart = _between(lengths, bias)
        return without_hiding(bias).masked_fill(apart | _future(bias) if is_causal else apart, HIDDEN)

    return instead
