"""Recognise attention masks, and yield mistakes in them: causal, windows, padding, segments, ALiBi."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from parity.mistakes.alternatives import numbers, tunable
from parity.mistakes.attention import HIDDEN, Bias, hidden_keys
from parity.mistakes.hypothesis import Mistake
from parity.numerics.blocked_attention import Band, distance_of
from parity.trace.trace import Edit

# Mistakes in the slopes of ALiBi, a bias that falls with the distance of a key (arXiv 2108.12409).


_EXACT = 1e-3  # a bias in a 16-bit dtype may deviate by this share of the slope


def other_slopes(bias: Tensor) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yield slopes that a port may have instead, each with the change from the reference's bias to that port's.

    Args:
        bias: ``[..., heads, queries, keys]``; nothing is found if it is not ALiBi's.
    """
    slopes = _slopes(bias)
    if slopes is None:
        return
    heads = len(slopes)
    named = {
        "the paper's, which are its default": papers_slopes(heads),
        f"2^(-8 i / {heads})": 2.0 ** (-8.0 * torch.arange(1.0, heads + 1.0, dtype=torch.float64) / heads),
        f"2^(-8 (i - 1) / {heads})": 2.0 ** (-8.0 * torch.arange(heads, dtype=torch.float64) / heads),
    }
    for times in (2, 4, 8):  # tensor parallel ranks, which hold some of the heads, may have these slopes
        named[f"the first {heads} of {times * heads} heads'"] = papers_slopes(times * heads)[:heads]
        if heads % times == 0:
            named[f"those of {heads // times} heads, repeated"] = papers_slopes(heads // times).repeat(times)
    named["the same in descending order"] = slopes.sort(descending=True).values
    ratios = {described: others.to(slopes) / slopes for described, others in named.items()}
    # A reference may scale its bias together with its scores; its slopes are then a multiple of some formula's.
    alike = [ratio[0].item() for ratio in ratios.values() if torch.allclose(ratio, ratio[0], rtol=_EXACT)]
    multiples = dict.fromkeys((1.0, *(1.0 / ratio for ratio in alike)))
    for (described, ratio), multiple in itertools.product(ratios.items(), multiples):
        change = multiple * ratio
        if not torch.allclose(change, torch.ones_like(change), rtol=_EXACT):
            yield described, lambda shown, change=change: shown * change[:, None, None].to(shown)  # type: ignore[misc]


def papers_slopes(heads: int) -> Tensor:
    """Return the paper's slopes ``[heads]``, FP64: a geometric sequence, with others between beyond a power of 2."""
    power = 2 ** math.floor(math.log2(heads))
    first = 2.0 ** (-8.0 * torch.arange(1.0, power + 1.0, dtype=torch.float64) / power)
    between = 2.0 ** (-4.0 * (2.0 * torch.arange(heads - power, dtype=torch.float64) + 1.0) / power)
    return torch.cat((first, between))


def _slopes(bias: Tensor) -> Tensor | None:
    """Return each head's slope from key to key, ``[heads]`` in FP64; None if it is not the same for all keys."""
    if bias.dim() < 3 or bias.shape[-3] < 2:
        return None
    shown = ~hidden_keys(bias).any(-3).flatten(0, -2)
    # Take the last of the queries that see the most keys: its keys come before it, even if a bias falls on both sides.
    last = len(shown) - 1 - int(shown.sum(-1).flip(0).argmax())
    keys = shown[last].nonzero().squeeze(1)
    if len(keys) < 3:
        return None
    steps = bias.movedim(-3, 0).flatten(1, -2)[:, last, keys].double().diff() / keys.diff()
    slopes = steps[:, :1]
    if bool((slopes <= 0.0).any()) or not bool(((steps - slopes).abs() <= _EXACT * slopes).all()):
        return None
    return slopes.squeeze(-1)


# Mistakes in attention masks: in the band of keys that each query sees, and in padding.


class Masked(Protocol):
    """An operation with a mask: one attention, or several, each to a sequence of its own."""

    def masked_by(self, bias: Bias) -> tuple[Edit, ...]:
        """Return the edits that apply ``bias`` to what is added to the scores."""


def _mask_mistake(title: str, name: str, repair: str, bias: Bias) -> Mistake[Masked]:
    """Return the mistake of adding ``bias(mask)`` instead of the reference's mask, ``[..., queries, keys]``."""
    return Mistake(title, name, repair, lambda one: one.masked_by(bias))


def mask_mistakes(bias: Tensor) -> Iterator[Mistake[Masked]]:
    """Yield the mistakes of ports in a mask, whether it is a band or one of several sequences.

    Args:
        bias: what the reference adds to its scores, ``[..., queries, keys]``; see ``hidden_keys``.
    """
    hidden = hidden_keys(bias)
    seen = seen_in(hidden)
    band, padded = seen.band, seen.padded
    yield from _of_a_cache(band, *hidden.shape[-2:])
    yield from _of_another_band(seen, *hidden.shape[-2:])
    if bool(hidden.any()):
        besides = padded or seen.of_sequences
        if band is None or math.isfinite(band.left) or (besides and math.isfinite(band.right)):
            repair = "give TE the reference's mask; the port hides no key"
            yield _mask_mistake("mask", "mask missing", repair, without_hiding)
        if not padded and hidden.shape[-1] == hidden.shape[-2] and not torch.equal(hidden, hidden.mT):
            repair = "give TE the reference's mask, [..., queries, keys]; the port exchanges queries and keys"
            yield _mask_mistake("mask", "mask transposed", repair, _hiding(lambda bias: hidden_keys(bias).mT))
        repair = "invert the mask: for TE True means hidden, for F.scaled_dot_product_attention it means visible"
        inverted: Bias = lambda bias: torch.where(hidden_keys(bias), 0.0, HIDDEN).to(bias.dtype)  # noqa: E731
        yield _mask_mistake("mask-polarity", "mask inverted", repair, inverted)
    yield from _other_biases(bias)
    if padded:
        yield from _of_other_keys(bias)
        repair = 'give TE attn_mask_type="padding" (or "padding_causal") and the padding mask; the port attends to'
        yield _mask_mistake("padding-mask", "padding ignored", f"{repair} padded keys", _with_padding_seen)
        right = "invert the padding mask: for TE True means that a key is hidden"
        for name, repair, change in (
            ("", right, _hiding(lambda bias: hidden_keys(bias) ^ _padding(bias) | ~_padding(bias))),
            (", for queries too", f"{right}; no query sees any", lambda bias: torch.full_like(bias, HIDDEN)),
            (
                ", lengths counted from it",
                f"{right}; sequences are as long as their padding",
                _hiding(lambda bias: _beyond(bias, _padding(bias).sum(-1, keepdim=True))),
            ),
        ):
            yield _mask_mistake("mask-polarity", f"padding mask inverted{name}", repair, change)
    yield from segment_mistakes(bias)


def _of_another_band(seen: Seen, queries: int, keys: int) -> Iterator[Mistake[Masked]]:
    """Yield bands that a port may have instead of the mask's."""
    band = seen.band
    if band is None:
        return
    for other, title, name, repair in _other_bands(band, queries, keys):
        instead = band_instead(replace(seen, band=other))
        yield _mask_mistake(title, name, repair, instead)
        if other.right < band.right:  # a port may leave queries as they are that would otherwise see nothing
            yield _mask_mistake(title, f"{name}, but where no key is left", repair, _sparing(instead))
    own = _own_key(band, queries, keys)
    moved = _moved_by(band, -own)

    def window(size: float) -> Mistake[Masked]:
        left = min(max(round(size), 1), keys)
        other = _moved_by(Band(left, 0 if moved.right == 0 else left), own)
        repair = f"{_right_window(moved)}; in the port, it sees {left}"
        instead = band_instead(replace(seen, band=other))
        return replace(_mask_mistake("window", f"window of {left}", repair, instead), adds=math.isinf(moved.left))

    yield from numbers(window, [moved.left], _other_windows(moved, keys))


def _of_other_keys(bias: Tensor) -> Iterator[Mistake[Masked]]:
    """Yield padding at the other end of sequences, and padding with one key too many or too few."""
    right = "hide the keys that the reference hides, and no others"
    last = bool(_padding(bias)[..., -1].any())
    end, other = ("last", "first") if last else ("first", "last")

    def padded(name: str, told: str, change: Callable[[Tensor], Tensor], queries_too: bool) -> Mistake[Masked]:
        name = f"padding {name}{', queries too' if queries_too else ''}"
        return _mask_mistake("padding-mask", name, right + told, _padded_otherwise(change, queries_too))

    of_end, taken = f": padding is the {end} keys of a sequence; ", f"taken to be {other}"
    lengths = (
        f'{of_end}it is taken to be the {other} ones, as if only lengths were counted (attn_mask_type="padding", '
        f'cu_seqlens): give TE attn_mask_type="arbitrary" and the mask, or move the padding to the {other} places'
    )
    flipped: Bias = lambda padding: padding.flip(-1)  # noqa: E731
    yield padded(taken, f"{of_end}as many of the {other} ones are hidden", flipped, queries_too=False)
    yield padded(taken, lengths, flipped, queries_too=True)
    lacks, seen = "each sequence lacks a token", "one padded key of each sequence is attended to"
    for described, by, queries_too in ((seen, 1, False), (lacks, -1, False), (lacks, -1, True)):
        yield padded(f"off by {by:+d}", f"; {described}", partial(_moved, by=by, last=last), queries_too)


def _moved(padding: Tensor, by: int, last: bool) -> Tensor:
    """Return padding that begins, seen from the tokens, one key later (``by`` 1) or earlier (-1)."""
    ordered = padding if last else padding.flip(-1)
    edge = torch.full_like(ordered[..., :1], by < 0)
    moved = torch.cat((edge, ordered[..., :-1]) if by > 0 else (ordered[..., 1:], edge), -1)
    return moved if last else moved.flip(-1)


def _padded_otherwise(change: Callable[[Tensor], Tensor], queries_too: bool) -> Bias:
    def hidden(bias: Tensor) -> Tensor:
        padding = _padding(bias)
        changed = change(padding)
        hidden = (hidden_keys(bias) & ~padding) | changed
        return hidden | changed.mT if queries_too and bias.shape[-1] == bias.shape[-2] else hidden

    return _hiding(hidden)


def _of_a_cache(band: Band | None, queries: int, keys: int) -> Iterator[Mistake[Masked]]:
    """Yield masks that lose keys at either end, for queries that come after most keys, as in a decoding step."""
    if keys <= queries or band is None or min(band.right, keys - 1) < keys - queries:
        return
    right = "let each query see the keys that the reference's sees: all before it, and its own"
    lost = {
        "the newest key is hidden": slice(keys - 1, keys),
        f"the {queries} newest keys, the step's own, are hidden": slice(keys - queries, keys),
        "the oldest key is hidden": slice(0, 1),
        f"the {queries} oldest keys are hidden": slice(0, queries),
    }
    for described, some in lost.items() if queries > 1 else list(lost.items())[::2]:
        repair = f"{right} (cache's length, cu_seqlens_kv, the mask's offset); {described}"
        yield _mask_mistake("cache-step", described, repair, hiding_too([(slice(None), some)]))


def hiding_too(blocks: Iterable[tuple[slice, slice]]) -> Bias:
    """Return a bias that additionally hides some keys from some queries, given as ``(queries, keys)``."""

    def instead(bias: Tensor) -> Tensor:
        hidden = torch.zeros_like(bias, dtype=torch.bool)
        for queries, keys in blocks:
            hidden[..., queries, keys] = True
        return bias.masked_fill(hidden, HIDDEN)

    return instead


def _other_biases(bias: Tensor) -> Iterator[Mistake[Masked]]:
    """Yield the mistakes of ports in a bias by position, which is added where keys are visible."""
    if not bool((without_hiding(bias) != 0.0).any()):
        return

    def changed(change: Bias) -> Bias:
        return lambda bias: torch.where(hidden_keys(bias), bias, change(without_hiding(bias)))

    right = 'give TE the reference\'s bias, as core_attention_bias_type="alibi" or "post_scale_bias"'

    def biased(name: str, repair: str, change: Bias) -> Mistake[Masked]:
        return _mask_mistake("attention-bias", name, repair, changed(change))

    yield biased("bias missing", f"{right}; it adds none", torch.zeros_like)
    yield biased("bias subtracted", f"{right}; the port subtracts it", torch.neg)
    if bias.shape[-1] == bias.shape[-2]:
        yield biased("bias transposed", f"{right}; the port exchanges query and key in it", lambda shown: shown.mT)
    for described, dims in (("keys in reverse order", (-1,)), ("queries and keys in reverse order", (-2, -1))):
        reverse: Bias = lambda shown, dims=dims: shown.flip(dims)  # type: ignore[misc]  # noqa: E731
        yield biased(f"bias of {described}", f"{right}; the port has that of {described}", reverse)
    for described, move in _moved_heads(bias).items():
        yield biased(f"bias of {described}", f"{right}; the heads of the port have that of {described}", move)
    for described, change in other_slopes(bias):
        slopes = f"give TE the reference's slopes as alibi_slopes; the port has {described}"
        yield biased(f"slopes {described}", slopes, change)

    def times(factor: float) -> Mistake[Masked]:
        told = f"{right}, added after the scores are scaled; the port's is {factor:.3g} times that"
        return biased(f"bias times {factor:.3g}", told, lambda shown: shown * factor)

    yield from numbers(times, [1.0], (0.5, 2.0))


def _moved_heads(bias: Tensor) -> dict[str, Bias]:
    """Return biases of other heads that a head may have, if those of ``[..., heads, queries, keys]`` differ."""
    if bias.dim() < 3 or torch.equal(bias, bias.roll(1, -3)):
        return {}
    return {
        "the heads in reverse order": lambda shown: shown.flip(-3),
        "the head before": lambda shown: shown.roll(1, -3),
        "the head after": lambda shown: shown.roll(-1, -3),
        "the first head": lambda shown: shown[..., :1, :, :].expand_as(shown),
    }


@dataclass(frozen=True)
class Seen:
    """Say which keys the queries of a mask see.

    Attributes:
        band: how many keys before and after its own a query sees; None if the mask is not a band.
        padded: whether there are also padded keys, which no query sees.
        of_sequences: whether there are several sequences, of which a query sees only its own.
    """

    band: Band | None
    padded: bool = False
    of_sequences: bool = False


def seen_in(hidden: Tensor) -> Seen:
    """Return what queries see under a mask ``[..., queries, keys]``.

    Padding and sequences may differ from one row of the batch to the next.
    """
    padding = hidden.all(-2, keepdim=True).expand_as(hidden)
    for others in (torch.zeros_like(hidden), padding):
        band = band_beside(others, hidden)
        if band is not None:
            return Seen(band, bool(others.any()))
    band = band_beside(_apart(hidden) | padding, hidden) if hidden.shape[-2] == hidden.shape[-1] else None
    return Seen(band, bool(padding.any()), band is not None)


def band_beside(others: Tensor, hidden: Tensor) -> Band | None:
    """Return the band that, together with ``others``, hides exactly what the mask hides; None if there is none."""
    distance = distance_of(range(hidden.shape[-2]), range(hidden.shape[-1]), hidden.device).expand_as(hidden)
    seen = distance[~hidden & ~others]
    left, right = (-int(seen.min()), int(seen.max())) if seen.numel() else (0, 0)
    for band in (Band(math.inf, math.inf), Band(math.inf, right), Band(left, math.inf), Band(left, right)):
        if bool((_hidden_by(band, hidden) | others).eq(hidden).all()):
            return band
    return None


def _sequences(hidden: Tensor) -> Tensor:
    """Return the number of each token's sequence, from 1 on, ``[..., seq]``.

    A token begins a sequence if neither it nor any later token sees, or is seen by, an earlier token.

    Args:
        hidden: ``[..., seq, seq]``.
    """
    tokens = torch.arange(hidden.shape[-1], device=hidden.device)
    linked = ~(hidden & hidden.mT)
    first = torch.where(linked.any(-1), linked.int().argmax(-1), tokens)  # the first that each sees, or is seen by
    first_of_later = first.flip(-1).cummin(-1).values.flip(-1)
    return (first_of_later >= tokens).cumsum(-1)


def _apart(hidden: Tensor) -> Tensor:
    """Return where query and key belong to different sequences, ``[..., seq, seq]``."""
    number = _sequences(hidden)
    return number[..., :, None] != number[..., None, :]


def _other_bands(band: Band, queries: int, keys: int) -> Iterator[tuple[Band, str, str, str]]:
    """Yield other bands, each with a title, a name and a repair."""
    if math.isinf(band.right):
        repair = 'give TE attn_mask_type="no_mask" (or "padding"); its layers hide later keys by default'
        yield replace(band, right=0), "mask", "causal mask added", repair
        if queries != keys:
            corner = f'{repair}; the port has "causal_bottom_right"'
            yield replace(band, right=keys - queries), "mask", "causal mask added at the bottom right", corner
        return
    repair = 'give TE attn_mask_type="causal" (or "padding_causal"); the port attends to later keys'
    yield replace(band, right=math.inf), "mask", "causal mask missing", repair
    for right, corner, argument in ((0, "top left", "causal"), (keys - queries, "bottom right", "causal_bottom_right")):
        repair = f"align the causal mask as the reference does; it is aligned {corner}, which TE calls {argument!r}"
        other = Band(band.left - right + band.right, right)
        if other != band:
            yield other, "mask-corner", f"causal mask aligned {corner}", repair
    for by, seen in ((-1, "one key too few"), (1, "one key too many")):
        repair = f"move the causal mask by one; in the port, a query sees {seen}"
        yield replace(band, right=band.right + by), "mask", f"causal mask off by {by:+d}", repair
    own = _own_key(band, queries, keys)
    right_window, left = _right_window(_moved_by(band, -own)), band.left + own
    if band.right > own:
        repair = f"{right_window}; in the port, it sees none after its own"
        yield replace(band, right=own), "window", "window before the query alone", repair
        for by in (-1, 1) if math.isfinite(band.left) else ():
            repair = f"{right_window}; in the port, it sees {left + by:g} and {band.right - own + by:g}"
            other = Band(band.left + by, band.right + by)
            yield other, "window", f"window off by {by:+d} on both sides", repair
    if math.isfinite(band.left):
        for by in (-1, 1):
            repair = f"{right_window}; in the port, it sees {left + by:g}"
            yield replace(band, left=band.left + by), "window", f"window off by {by:+d}", repair
        yield replace(band, left=math.inf), "window", "window missing", f"{right_window}; in the port, it sees all"


def _own_key(band: Band, queries: int, keys: int) -> int:
    """Return how far a query's own key is to the right of the query's number: 0, or up to the bottom right corner."""
    corner = keys - queries
    return corner if 0 < corner == band.right != band.left else 0


def _moved_by(band: Band, places: int) -> Band:
    return Band(band.left - places, band.right + places)


def _other_windows(band: Band, keys: int) -> Iterator[float]:
    """Yield other window sizes before a query's own key, spread widely enough for a search to reach those between."""
    sizes = [band.left / 2, band.left * 2]
    if math.isinf(band.left):  # a search goes up to eight times as far, but not from one whole number to the next
        sizes = [*(keys * share for share in (7 / 8, 3 / 4, 1 / 2, 1 / 4, 1 / 8)), *range(1, 4)]
    yield from (size for size in sizes if 1 <= size < keys)


def _right_window(band: Band) -> str:
    left, right = (-1 if math.isinf(side) else f"{side:g}" for side in (band.left, band.right))
    return f"give TE window_size=({left}, {right}), the number of keys that a query sees before and after its own"


def band_instead(seen: Seen) -> Bias:
    """Return a bias that hides what a band hides, and also the mask's own padding and other sequences."""

    def hidden(bias: Tensor) -> Tensor:
        assert seen.band is not None
        of_band = _hidden_by(seen.band, bias)
        of_band = of_band | _padding(bias) if seen.padded else of_band
        return of_band | _apart(hidden_keys(bias)) if seen.of_sequences else of_band

    return _hiding(hidden)


def _hidden_by(band: Band, like: Tensor) -> Tensor:
    return band.hidden(range(like.shape[-2]), range(like.shape[-1]), like.device)


def _with_padding_seen(bias: Tensor) -> Tensor:
    """Return the bias with padded keys visible to queries whose band they are in, or to all if there is no band."""
    hidden = hidden_keys(bias)
    seen = seen_in(hidden)
    if seen.band is not None and not seen.of_sequences:
        return band_instead(replace(seen, padded=False))(bias)
    return without_hiding(bias).masked_fill(hidden & ~_padding(bias), HIDDEN)


def _beyond(like: Tensor, length: Tensor) -> Tensor:
    """Return where a query or a key comes after the first ``length`` tokens."""
    queries, keys = (torch.arange(count, device=like.device) for count in like.shape[-2:])
    return (queries[:, None] >= length) | (keys >= length)


def _sparing(instead: Bias) -> Bias:
    def sparing(bias: Tensor) -> Tensor:
        changed = instead(bias)
        return torch.where(hidden_keys(changed).all(-1, keepdim=True), bias, changed)

    return sparing


def _hiding(hidden: Callable[[Tensor], Tensor]) -> Bias:
    """Return a bias that hides exactly the keys that ``hidden`` returns for it."""
    return lambda bias: without_hiding(bias).masked_fill(hidden(bias), HIDDEN)


def _padding(bias: Tensor) -> Tensor:
    """Return where a key is padding, which means that no query sees it."""
    return hidden_keys(bias).all(-2, keepdim=True)


def without_hiding(bias: Tensor) -> Tensor:
    """Return the bias with 0 for hidden keys; a bias by position stays."""
    return bias.masked_fill(hidden_keys(bias), 0.0)


# Masks of several sequences in one: each token sees only its own sequence, and often only what comes before it.
#
# Packed sequences, documents and chunks have such masks. A prefix that all tokens see, or padding before a sequence,
# gives masks that are not bands either; ports have the causal mask instead.


_CAUSAL = Band(right=0)
_FEW_BORDERS = 8  # with no more sequences than this, each border is moved or left out alone


def segment_mistakes(bias: Tensor) -> Iterator[Mistake[Masked]]:
    """Yield the mistakes of ports in a mask that is not a band.

    Args:
        bias: what the reference adds to its scores, ``[..., queries, keys]``; at most ``HIDDEN`` where a key is hidden.
    """
    hidden = hidden_keys(bias)
    seen = seen_in(hidden)
    if (seen.band is not None and not seen.of_sequences) or not bool(hidden.any()):
        return
    right = 'give TE the reference\'s mask, attn_mask_type="arbitrary" and attention_mask (True means hidden)'
    lengths, is_causal = lengths_of(hidden), bool((hidden | ~_future(hidden)).all())
    if lengths is None or not is_causal:
        alone = f"{right}; the port has the causal one alone"
        yield _mask_mistake("mask", "causal mask alone", alone, _hiding(_future))
    if lengths is not None:
        yield from _other_segments(lengths, _CAUSAL if is_causal else Band())
    elif seen.of_sequences:
        across = f"{right}; the port has one sequence, across all borders"
        yield _mask_mistake("mask", "one sequence, across all borders", across, _hiding(_across_borders))
    if bool(_padded_before(hidden).any()):
        name = "padding before sequences taken for padding after them"
        after = f"{right}; the port takes padding to follow a sequence, and counts as many tokens from the first"
        yield _mask_mistake("padding-mask", name, after, _hiding(_as_padded_after))


def _across_borders(bias: Tensor) -> Tensor:
    """Return what is hidden if all sequences are taken for one: the same band and padding, without borders."""
    hidden = hidden_keys(bias)
    seen = seen_in(hidden)
    return _hidden_by(seen.band, bias) | _padding(bias) if seen.of_sequences and seen.band else hidden


def _other_segments(lengths: Sequence[int], band: Band) -> Iterator[Mistake[Masked]]:
    right, is_causal = right_sequences(lengths), band == _CAUSAL

    def of_lengths(name: str, other: Sequence[int], band: Band = band) -> Mistake[Masked]:
        return _mask_mistake("mask", name, f"{right}; the port has {name}", sequences_instead(other, band))

    yield one_sequence(lengths, band)
    other_way = f"sequences that are {'not ' if is_causal else ''}causal"
    yield of_lengths(other_way, lengths, Band() if is_causal else _CAUSAL)
    orders = {"in reverse order": lengths[::-1], "shortest first": sorted(lengths)}
    orders["longest first"] = orders["shortest first"][::-1]
    if sum(lengths) % len(lengths) == 0:
        orders["made equal"] = [sum(lengths) // len(lengths)] * len(lengths)
    for by in (-1, 1):  # every border except the two ends
        if lengths[0] + by > 0 and lengths[-1] - by > 0:
            orders[f"with every border moved by {by:+d}"] = [lengths[0] + by, *lengths[1:-1], lengths[-1] - by]
    chunk = lengths[0]
    if set(lengths[:-1]) == {chunk} and lengths[-1] <= chunk:  # attention in chunks, as in Llama 4
        for other in (chunk // 2, 2 * chunk, chunk - 1, chunk + 1):
            whole, rest = divmod(sum(lengths), max(other, 1))
            orders[f"made those of chunks of {other} tokens"] = [*[max(other, 1)] * whole, *[rest] * (rest > 0)]
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
        yield tunable(partial(_window_for_segments, right))(max(lengths) - 1)


def one_sequence(lengths: Sequence[int], band: Band) -> Mistake[Masked]:
    """Return the mistake of taking sequences of these lengths for one, in which each query sees this band."""
    name, instead = "one sequence, across all borders", sequences_instead([sum(lengths)], band)
    return _mask_mistake("mask", name, f"{right_sequences(lengths)}; the port has {name}", instead)


def right_sequences(lengths: Sequence[int]) -> str:
    """Return what to do about sequences that are not of these lengths."""
    borders = [0, *accumulate(lengths)]
    return f"give TE the reference's sequences, cu_seqlens={borders} in format thd, or its mask as an arbitrary one"


def is_of_sequences(hidden: Tensor) -> bool:
    """Return whether a mask ``[..., seq, seq]`` is causal, in one sequence or in several."""
    return torch.equal(_future(hidden).expand_as(hidden), hidden) or (
        lengths_of(hidden) is not None and bool((hidden | ~_future(hidden)).all())
    )


def _window_for_segments(right: str, size: float) -> Mistake[Masked]:
    left = max(round(size), 1)
    repair = f"{right}; the port has a window of {left} keys before the query's own"
    window = _hiding(partial(_hidden_by, Band(left, 0)))
    return _mask_mistake("window", f"window of {left}, not sequences", repair, window)


def lengths_of(hidden: Tensor) -> list[int] | None:
    """Return the lengths of the sequences of a mask ``[..., seq, seq]``, each full or causal; None for other masks."""
    seq = hidden.shape[-1]
    if hidden.shape[-2] != seq or seq < 2 or not bool((hidden == hidden[(0,) * (hidden.dim() - 2)]).all()):
        return None
    one = hidden[(0,) * (hidden.dim() - 2)]
    lengths: list[int] = _sequences(one).bincount()[1:].tolist()
    apart = _apart(one)
    is_it = torch.equal(apart, one) or torch.equal(apart | _future(one), one)
    return lengths if is_it and len(lengths) > 1 else None


def _between(lengths: Sequence[int], like: Tensor) -> Tensor:
    """Return where query and key belong to different sequences, ``[seq, seq]``."""
    number = torch.arange(len(lengths), device=like.device).repeat_interleave(
        torch.tensor(lengths, device=like.device), output_size=sum(lengths)
    )
    return number[:, None] != number


def _future(like: Tensor) -> Tensor:
    """Return which keys come after each query, ``[queries, keys]``."""
    return distance_of(range(like.shape[-2]), range(like.shape[-1]), like.device) > 0


def _padded_before(hidden: Tensor) -> Tensor:
    """Return which keys come before the first one that the last query sees, ``[..., keys]``."""
    return (~hidden[..., -1, :]).cumsum(-1) == 0


def _as_padded_after(bias: Tensor) -> Tensor:
    """Return the hidden keys if the padding before the tokens is moved after them."""
    hidden = hidden_keys(bias)
    beyond = _beyond(bias, (~_padded_before(hidden)).sum(-1)[..., None, None])
    return beyond | _future(hidden) if bool((hidden | ~_future(hidden)).all()) else beyond


def sequences_instead(lengths: Sequence[int], band: Band) -> Bias:
    """Return a bias that replaces a mask by a band in each of the sequences of these lengths."""

    def instead(bias: Tensor) -> Tensor:
        if bias.shape[-2:] != (sum(lengths), sum(lengths)):
            return bias
        return without_hiding(bias).masked_fill(_between(lengths, bias) | _hidden_by(band, bias), HIDDEN)

    return instead
