"""Mistakes in rotary embeddings: base, layout, positions, rotated channels, rounding, and norms on the wrong side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from parity.mistakes.alternatives import numbers
from parity.mistakes.attention import Attention, attentions
from parity.mistakes.hypothesis import (
    Hypothesis,
    Mistake,
    Row,
    at_each_scope,
    low_dtypes,
    more_like_it,
    short,
    titled,
    with_attributes,
)
from parity.mistakes.norms import Norm, norms
from parity.mistakes.rope_scaling import scaling_mistakes
from parity.mistakes.rotation import (
    Edits,
    Form,
    Phases,
    Rotation,
    frequencies,
    grid_mistakes,
    rotations,
    with_angles,
    with_positions,
)
from parity.mistakes.usual_numbers import USUAL
from parity.numerics.formats import tf32
from parity.shown import written
from parity.trace.trace import RESHAPES, Edit, Site, Trace, Value, back, edit, grouped, instead, ordinal

# Ports that count positions in another way than the reference.


_LATEST = 32  # the largest offset to try, though a cache, a prefix or registers before a sequence may be longer


def position_mistakes() -> Iterator[Mistake[Rotation]]:
    """Yield positions counted in other ways; the same offset for query and key would change nothing."""
    for role in ("query", "key"):
        for by in (-1, 1):
            told = f"count positions of query and key alike; the {role}'s are off by {by:+d}"
            yield _position(f"of the {role} off by {by:+d}", told, partial(_turned_more, role, by))
    for by in (-1, 1):
        told = "rotate by the reference's positions, where a cache has keys that were rotated before (start_positions)"
        moved = with_positions(lambda positions, by=by: positions + by)  # type: ignore[misc]
        yield _position(f"off by {by:+d}", f"{told}; the port's are off by {by:+d}", moved)
    yield from numbers(_divided_by, usual=USUAL.interpolation_factors)
    yield _position(
        "counted through",
        "give TE angles of the reference's positions as rotary_pos_emb; the port counts them from the first token on, "
        "where the reference's begin again, or skip or repeat some",
        with_positions(lambda positions: torch.arange(len(positions)).to(positions)),
    )

    def by_number(one: Rotation) -> tuple[Edit, ...]:
        if one.of_axes is None:
            return ()
        return one.edits(angles=torch.arange(len(one.angles), device=one.of_axes.device)[:, None] * one.of_axes)

    yield Mistake(
        "rope-position",
        "rope of one axis",
        "rotate each pair of channels by the token's position along its axis (time, height or width), as the reference "
        "does; the port rotates all of them by the token's number",
        by_number,
    )


def restart_mistakes(seq: int) -> Iterator[Mistake[Rotation]]:
    """Yield positions that begin again, or are clamped, after a part of the sequence or after a power of two."""
    powers = (1 << exponent for exponent in range(1, seq.bit_length()))
    lengths = dict.fromkeys((*(seq // parts for parts in (2, 3, 4, 8)), *powers))
    right = "rotate by the reference's positions"
    for length in (length for length in lengths if 1 < length < seq):
        again = with_positions(lambda positions, length=length: positions % length)  # type: ignore[misc]
        yield _position(f"modulo {length}", f"{right}; the port's begin again after each {length}", again)
        clamped = with_positions(lambda positions, last=length - 1: positions.clamp(max=last))  # type: ignore[misc]
        yield _position(f"up to {length - 1}", f"{right}; the port clamps those beyond {length - 1} to it", clamped)


def late_mistakes(seq: int) -> Iterator[Mistake[Rotation]]:
    """Yield positions of keys that are up to ``_LATEST`` earlier or later than those of queries.

    The edits turn queries the other way instead, which has the same effect. In decoding, a single query may be wrong.
    """
    right = "count positions of query and key alike"
    for by in (sign * count for count in range(2, min(seq, _LATEST + 1)) for sign in (1, -1)):
        told = f"{right}; the key's are off by {by:+d}, or the query's by {-by:+d}"
        yield _position(f"of the key off by {by:+d}", told, partial(_turned_more, "query", -by))


def _position(name: str, repair: str, edits: Edits) -> Mistake[Rotation]:
    return Mistake("rope-position", f"rope positions {name}", repair, edits)


def _divided_by(factor: float) -> Mistake[Rotation]:
    told = f"leave out seq_len_interpolation_factor={factor:.4g}; positions are divided by it"
    return _position(f"divided by {factor:.4g}", told, with_positions(lambda positions: positions / factor))


def _turned_more(role: str, by: int, one: Rotation) -> tuple[Edit, ...]:
    if one.role != role or one.phases is None:
        return ()
    return one.edits(angles=one.angles + by * one.phases[1])


# Layers without rotary embedding (NoPE) among layers that have one, which ports rotate like the others.


_TITLE = "rope-unwanted"


@dataclass(frozen=True)
class _Plain:
    """An attention whose query and key are not rotated."""

    name: str
    attention: Attention

    def edits(self, like: Rotation) -> tuple[Edit, ...]:
        """Return the edits that rotate both as another layer rotates its own."""
        turn = _turn(like)
        return self.attention.edits(arrange=(turn, turn, None, None))


def unrotated_hypotheses(trace: Trace, kinds: Sequence[Sequence[Rotation]]) -> Iterator[Hypothesis]:
    """Yield the mistakes of rotating layers without a rotation: all, each alone, or instead of their neighbours.

    Args:
        trace: the reference's trace.
        kinds: its rotations, alike ones together.
    """
    rotated = {one.attention for kind in kinds for one in kind}
    for kind in kinds:
        like = kind[0]
        plain = [
            _Plain(attention.call.site[0], attention)
            for attention in attentions(trace)
            if attention.call.site not in rotated and all(_as_long(trace, attention, i, like) for i in range(2))
        ]
        if not plain:
            continue
        repair = "pass TE no rotary_pos_emb where the reference rotates nothing; the port rotates query and key"
        mistake = Mistake[_Plain](_TITLE, "rope in layers without", repair, partial(_Plain.edits, like=like))
        where = f" in {', '.join(one.name for one in plain)}"
        yield from at_each_scope([mistake], plain, lambda one: one.name, where=where)
        yield from _shifted(trace, kind, plain)


def _rotated_values(trace: Trace, kinds: Sequence[Sequence[Rotation]]) -> Iterator[Hypothesis]:
    """Yield the mistake of rotating values with queries and keys, as may happen if all three are packed."""
    likes = {one.attention: one for kind in kinds for one in kind}
    found = [
        _Plain(attention.call.site[0], attention)
        for attention in attentions(trace)
        if (like := likes.get(attention.call.site)) is not None and _as_long(trace, attention, 2, like)
    ]
    mistake = Mistake[_Plain](
        _TITLE,
        "rope on the values too",
        "rotate queries and keys alone, as the reference does; the port rotates values as well",
        lambda one: one.attention.edits(arrange=(None, None, _turn(likes[one.attention.call.site]), None)),
    )
    yield from at_each_scope([mistake], found, lambda one: one.name)


def _shifted(trace: Trace, kind: Sequence[Rotation], plain: Sequence[_Plain]) -> Iterator[Hypothesis]:
    """Yield the mistakes of giving each layer the rotation, or none, of the layer before or after it."""
    of_plain = {one.attention.call.site: one for one in plain}
    of_kind = {*of_plain, *(one.attention for one in kind)}
    sites = [attention.call.site for attention in attentions(trace) if attention.call.site in of_kind]
    told: set[tuple[Site, ...]] = set()
    for by, where in ((1, "before"), (-1, "behind")):
        sources = [sites[(i - by) % len(sites)] for i in range(len(sites))]
        changed = [
            site for site, source in zip(sites, sources, strict=True) if (site in of_plain) != (source in of_plain)
        ]
        if tuple(changed) in told:
            continue
        told.add(tuple(changed))
        added = [edit for site in changed if site in of_plain for edit in of_plain[site].edits(kind[0])]
        lost = [edit for one in kind if one.attention in changed for edit in one.edits(times=0)]
        names = ", ".join(one.name for one in plain)
        yield Hypothesis(
            _TITLE,
            f"rope of the layer {where}",
            f"leave rotary_pos_emb out in {names}; each layer is rotated, or not, as the one {where} it is in the "
            f"reference",
            (*added, *lost),
        )


def _as_long(trace: Trace, attention: Attention, which: int, like: Rotation) -> bool:
    """Return whether the query, key or value (0, 1, 2) has the length and width that another layer rotates."""
    value = (attention.query, attention.key, attention.value)[which]
    shape = attention.to_heads[which](trace.tensor(value)).shape
    return tuple(shape[-2:]) == (len(like.angles), like.head_dim)


def _turn(like: Rotation) -> Callable[[Tensor], Tensor]:
    """Return the same rotation for ``[..., heads, seq, head_dim]``."""
    return replace(like, axis=-2).compute


# All mistakes in rotary position embeddings.


def rope_hypotheses(trace: Trace, dtype: torch.dtype) -> Iterator[Hypothesis]:
    """Yield every known mistake that could have been made with the reference's rotary embeddings.

    Args:
        trace: the reference's trace.
        dtype: the dtype of the port's weights.
    """
    found = rotations(trace)
    if not found:
        return
    # Local layers may have another base than global ones.
    layers, kinds = (
        _by_layer(found),
        list(grouped(found, lambda one: (one.form, one.start, one.rotary, one.base)).values()),
    )
    forms, positions = list(_forms(found[0])), list(position_mistakes())
    # With a single token, a missing rotation and position 0 are the same, and the latter is likelier.
    likeliest = [*positions, *forms] if len(found[0].angles) == 1 else [*forms, *positions]
    of_all = [*likeliest, *(_of_frequencies(found) if len(kinds) == 1 else ()), *_rounded(dtype)]
    yield from at_each_scope(map(_in_layer, of_all), layers, lambda one: one.name)
    for some in kinds if len(kinds) > 1 else ():
        of_kind = [layer for layer in layers if set(layer.rotations) & set(some)]
        mistakes = [*_forms(some[0]), *_of_frequencies(some)]
        where = f" in {of_kind[0].name}{more_like_it(len(of_kind))}"
        yield from at_each_scope(map(_in_layer, mistakes), of_kind, lambda one: one.name, where=where)
    yield from _exchanged(layers, kinds)
    yield from unrotated_hypotheses(trace, kinds)
    yield from _rotated_values(trace, kinds)
    # One table of angles serves all layers.
    seq = len(found[0].angles)
    yield from at_each_scope(map(_in_layer, chain(restart_mistakes(seq), late_mistakes(seq))), layers)


def _exchanged(layers: Sequence[_Layer], kinds: Sequence[Sequence[Rotation]]) -> Iterator[Hypothesis]:
    """Yield the mistakes of rotating each layer like the one before or after it."""
    kind_of = {one: number for number, kind in enumerate(kinds) for one in kind}
    own = [[kind_of[one] for one in layer.rotations] for layer in layers]
    told = [own]
    for by, where in ((1, "before"), (-1, "behind")):
        sources = [layers[(i - by) % len(layers)] for i in range(len(layers))]
        given = [[kind_of[one] for one in layer.rotations] for layer in sources]
        if given in told or len({len(layer.rotations) for layer in layers}) > 1:
            continue
        told.append(given)
        both = zip(layers, sources, strict=True)
        pairs = [pair for one, other in both for pair in zip(one.rotations, other.rotations, strict=True)]
        changed = [(one, other) for one, other in pairs if kind_of[one] != kind_of[other]]
        yield Hypothesis(
            "rope-base",
            f"rope angles of the layer {where}",
            f"give each layer the rotary_pos_emb that the reference has there; each has that of the one {where} it",
            tuple(made for one, other in changed for made in one.edits(angles=other.angles, amplitude=other.amplitude)),
        )


def _of_frequencies(some: Sequence[Rotation]) -> list[Mistake[Rotation]]:
    """Return mistakes in the frequencies of rotations of one kind."""
    return [*_frequencies(some[0]), *scaling_mistakes(some), *grid_mistakes(some[0])]


@dataclass(frozen=True)
class _Layer:
    """The rotations of one attention's query and key."""

    name: str
    rotations: tuple[Rotation, ...]


def _by_layer(found: Sequence[Rotation]) -> list[_Layer]:
    layers = grouped(found, lambda one: one.attention)
    modules = [site[0] if site is not None else "" for site in layers]
    names = modules if len(set(modules)) == len(modules) else [f"attention {i}" for i in range(1, len(modules) + 1)]
    return [_Layer(name, tuple(some)) for name, some in zip(names, layers.values(), strict=True)]


def _in_layer(mistake: Mistake[Rotation]) -> Mistake[_Layer]:
    """Return the mistake made with all rotations of a layer."""
    family = mistake.tuned
    edits = lambda layer: [one for rotation in layer.rotations for one in mistake.edits(rotation)]  # noqa: E731
    tuned = None if family is None else lambda value: _in_layer(family(value))
    return Mistake(mistake.title, mistake.name, mistake.repair, edits, mistake.subtle, mistake.value, tuned)


def _forms(like: Rotation) -> Iterator[Mistake[Rotation]]:
    other = _other_form(like)
    interleaved = like.form == "interleaved"
    layouts: dict[str, Row[Rotation]] = {
        f"rope {other}": (
            f"give TE interleaved={interleaved}, or reorder the rows of query and key by parity.rope_halves; it "
            f"rotates pairs of the {other} form",
            with_attributes(form=other, table_form=other),
        ),
        f"rope {other}, by angles of {like.form}": (
            f"give TE's layer rotary_pos_interleaved={interleaved}, as its RotaryPositionEmbedding has it; it rotates "
            f"pairs of the {other} form by angles that are laid out for {like.form}",
            with_attributes(form=other, table_form=like.form),
        ),
        f"rope {like.form}, by angles of {other}": (
            f"give TE's RotaryPositionEmbedding interleaved={interleaved}, as its layer has it; pairs are of the "
            f"{like.form} form, but angles are laid out for {other}",
            with_attributes(form=like.form, table_form=other),
        ),
    }
    yield from titled("rope-layout", layouts)
    last = like.head_dim - like.rotary
    if last:
        right, wrong, start = (
            (f"the first {like.rotary} channels", "last", last)
            if like.start == 0
            else (f"{like.rotary} channels from the {ordinal(like.start + 1)} on", "first", 0)
        )
        yield Mistake(
            "rope-partial",
            f"rope on the {wrong} channels",
            f"rotate {right} of a head; the port rotates its {wrong} {like.rotary}",
            with_attributes(start=start),
        )
    yield Mistake(
        "rope-missing", "rope missing", "pass TE rotary_pos_emb; nothing is rotated", with_attributes(times=0)
    )
    for role, lacking in (("query", "key"), ("key", "query")):
        repair, alone = f"rotate both query and key; the {lacking} is not rotated", f"rope on the {role} alone"
        edits = with_attributes(lambda one, lacking=lacking: one.role == lacking, times=0)  # type: ignore[misc]
        yield Mistake("rope-one-side", alone, repair, edits)
    yield Mistake(
        "rope-twice", "rope twice", "rotate query and key once; the port rotates them twice", with_attributes(times=2)
    )
    yield Mistake(
        "rope-direction",
        "rope backwards",
        "rotate by positive angles; query and key are turned the other way",
        lambda one: one.edits(angles=-one.angles),
    )


def _other_form(like: Rotation) -> Form:
    return "interleaved" if like.form == "halves" else "halves"


def _frequencies(like: Rotation) -> Iterator[Mistake[Rotation]]:
    if like.base is None:
        return
    if like.rotary < like.head_dim:
        yield Mistake(
            "rope-base",
            "rope frequencies of the whole head",
            f"divide by the rotated channels in base ** (-2 i / {like.rotary}), as TE's RotaryPositionEmbedding"
            f"({like.rotary}) does; the port divides by the {like.head_dim} of a whole head",
            partial(_slower, like.base),
        )
    yield from numbers(partial(_base_instead, like.base), [like.base], USUAL.rope_bases, subtle=True)
    right, other = f"give TE rotary_percent={like.rotary / like.head_dim:g}", _other_form(like)
    shares: dict[str, Row[Rotation]] = {
        f"rope on {share:g} of the channels": (
            f"{right}; it rotates {100 * share:g}% of a head's channels",
            _with_frequencies(like.base, share),
        )
        for share in USUAL.rope_shares
        if like.start == 0 and int(like.head_dim * share) != like.rotary
    }
    if like.start == 0 and like.rotary < like.head_dim:  # a port that keeps both of TE's defaults
        both = f"{right} and interleaved={like.form == 'interleaved'}"
        shares[f"rope {other} on all of the channels"] = (
            f"{both}; it rotates all of a head's channels, in pairs of the {other} form",
            _with_frequencies(like.base, 1.0, other),
        )
    yield from titled("rope-partial", shares)


def _base_instead(right: float, base: float) -> Mistake[Rotation]:
    return Mistake(
        "rope-base",
        f"rope base={written(base)}",
        f"give TE rotary_base={written(right, 7)}; it rotates with base {written(base)}",
        _with_frequencies(base),
    )


def _slower(base: float, one: Rotation) -> tuple[Edit, ...]:
    """Return the edits that rotate by the first frequencies of a whole head."""
    if one.phases is None:
        return ()
    of_head = frequencies(base, one.head_dim)[: one.rotary // 2].to(one.angles.device)
    return one.edits(angles=one.phases[0][:, None] * of_head)


def _rounded(dtype: torch.dtype) -> Iterator[Mistake[Rotation]]:
    """Yield frequencies, phases, positions or tables that are rounded to too few bits."""
    for low in low_dtypes(dtype):
        # BF16 in an FP16 port is not a subtle mistake.
        subtle = dtype in (low, torch.float32)
        for described, phases in _rounded_phases(low).items():
            yield Mistake(
                "rope-precision",
                f"rope {described}",
                f"compute rotary frequencies and phases in FP32, not under autocast and before "
                f".to({str(low).removeprefix('torch.')}); the port has {described}",
                with_angles(phases),
                subtle,
            )
        yield Mistake(
            "rope-precision",
            f"rope cosines and sines in {short(low)}",
            f"keep rotary cosines and sines in FP32; the port rounds them to {short(low)}",
            with_attributes(table=low),
            subtle,
        )
    yield Mistake(
        "rope-precision",
        "rope phases from a TF32 product",
        "multiply rotary positions and frequencies in FP32, elementwise or with allow_tf32 off; the port takes phases "
        "from a TF32 product",
        with_angles(lambda positions, frequency: _tf32(positions)[:, None] * _tf32(frequency)),
        subtle=True,
    )


def _rounded_phases(low: torch.dtype) -> dict[str, Phases]:
    def rounded(x: Tensor) -> Tensor:
        return x.float().to(low).double()

    return {
        f"frequencies in {short(low)}": lambda positions, frequency: positions[:, None] * rounded(frequency),
        f"phases in {short(low)}": lambda positions, frequency: rounded(positions[:, None] * frequency),
        f"positions in {short(low)}": lambda positions, frequency: rounded(positions)[:, None] * frequency,
        f"frequencies and phases in {short(low)}": lambda positions, frequency: rounded(
            rounded(positions)[:, None] * rounded(frequency)
        ),
    }


def _with_frequencies(base: float, share: float | None = None, form: Form | None = None) -> Edits:
    """Return the ``edits`` of a mistake with another base, share of channels and form; None keeps the right one."""

    def edits(one: Rotation) -> tuple[Edit, ...]:
        if one.phases is None:
            return ()
        rotary = one.rotary if share is None else int(one.head_dim * share) // 2 * 2
        if rotary == one.rotary and one.base is not None and math.isclose(base, one.base, rel_tol=1e-3):
            return ()
        angles = one.phases[0][:, None] * frequencies(base, rotary).to(one.angles.device)
        return one.edits(angles=angles, form=form or one.form)

    return edits


def _tf32(x: Tensor) -> Tensor:
    return tf32(x.float()).double()


# Norms of queries and keys on the wrong side of the rotation.


def norm_order_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield the mistake of rotating queries and keys before instead of after a norm, or the reverse.

    A rotation keeps the mean of squares, so the two orders differ only in the channels that the gain meets. This does
    not hold for norms that subtract the mean, and without a gain there is no difference to find.
    """
    scaled = [(norm, norm.gain) for norm in norms(trace) if norm.gain and not norm.bias and not norm.centred]
    turned = rotations(trace) if scaled else []
    pairs = [(norm, gain, rotation) for norm, gain in scaled for rotation in turned]
    norm_first = [_rotated_first(*pair) for pair in pairs if _is_given(trace, pair[2], pair[0])]
    norm_last = [_rotated_last(*pair) for pair in pairs if _is_given(trace, pair[0], pair[2])]
    for edits, right, wrong in ((norm_first, "before", "after"), (norm_last, "after", "before")):
        if edits:
            yield Hypothesis(
                "norm-order",
                f"query and key norms {wrong} the rotation",
                f"normalize queries and keys {right} the rotation, as the reference does (TE's layers do it with "
                f"qk_norm_before_rope={right == 'before'}); the port scales them by their norms' weights {wrong} it",
                tuple(chain.from_iterable(edits)),
            )


def _is_given(trace: Trace, one: Norm | Rotation, other: Norm | Rotation) -> bool:
    """Return whether ``one`` reads the result of ``other``, possibly reshaped."""
    return bool(back(trace, one.x, RESHAPES) == back(trace, other.call.outputs[0], RESHAPES))


def _rotated_first(norm: Norm, gain: Value, rotation: Rotation) -> tuple[Edit, ...]:
    """Return the edits that apply the norm's gain after the rotation."""
    scaled = lambda x, by: rotation.compute(x) * _by_head(by, rotation)  # noqa: E731
    return (*norm.edits(gain=None), instead(rotation.call, (rotation.x, gain), scaled))


def _rotated_last(norm: Norm, gain: Value, rotation: Rotation) -> tuple[Edit, ...]:
    """Return the edits that apply the norm's gain before the rotation, by turning back, scaling and turning again."""
    plain = replace(norm, gain=None)

    def scaled(was: Tensor, x: Tensor, by: Tensor) -> Tensor:
        normed, turn = plain.compute(x), rotation
        if len(by) > rotation.head_dim:  # a norm of all heads at once, [..., seq, heads * head_dim]
            normed, turn = normed.unflatten(-1, (-1, rotation.head_dim)), replace(rotation, axis=-3)
        before = replace(turn, angles=-turn.angles).compute(normed)
        return turn.compute(before * _by_head(by, turn)).reshape(was.shape).to(was.dtype)

    return (edit(norm.call, (norm.x, gain), scaled),)


def _by_head(gain: Tensor, rotation: Rotation) -> Tensor:
    """Return the gain of a norm over one head or all heads, in the layout of the rotation's input."""
    heads = gain.unflatten(0, (-1, rotation.head_dim))
    return heads.unsqueeze(1) if rotation.axis == -2 and len(heads) > 1 else heads
