"""What ports get wrong about rotary position embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.low_dtypes import low_dtypes, short
from parity.diagnosis.mistake import Mistake, everywhere_and_somewhere
from parity.diagnosis.rope.rope_axes import grid_mistakes
from parity.diagnosis.rope.rope_positions import Edits, Phases, position_mistakes, restart_mistakes, with_angles
from parity.diagnosis.rope.rope_scaling import scaling_mistakes
from parity.diagnosis.rope.rope_unrotated import unrotated_hypotheses
from parity.diagnosis.rope.rotation import Form, Rotation, frequencies, rotations
from parity.formats import tf32
from parity.watching.trace import Edit, Site, Trace

BASES = (10_000.0, 500_000.0, 1_000_000.0, 100_000.0, 1_000.0)
"""Of Llama, Llama 3, Qwen, and others between them."""

_SHARES = (0.25, 0.5, 0.75, 1.0)


def rope_hypotheses(trace: Trace, module: nn.Module, dtype: torch.dtype) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with the reference's rotary embeddings.

    Args:
        trace: of the reference.
        module: the reference.
        dtype: of the port's weights.
    """
    found = rotations(trace)
    if not found:
        return
    layers, kinds = _by_layer(found), _by_kind(found)
    forms, positions = list(_forms(found[0])), list(position_mistakes())
    # A single token that is not rotated is one at position 0.
    likeliest = [*positions, *forms] if len(found[0].angles) == 1 else [*forms, *positions]
    of_all = [*likeliest, *(_of_frequencies(found) if len(kinds) == 1 else ()), *_rounded(dtype)]
    yield from everywhere_and_somewhere(map(_in_layer, of_all), layers, module, lambda one: one.name)
    for some in kinds if len(kinds) > 1 else ():
        of_kind = [layer for layer in layers if set(layer.rotations) & set(some)]
        mistakes = [*_forms(some[0]), *_of_frequencies(some)]
        where = f" in {_together(of_kind)}"
        yield from everywhere_and_somewhere(
            map(_in_layer, mistakes), of_kind, module, lambda one: one.name, where=where
        )
    yield from unrotated_hypotheses(trace, module, kinds)
    # One table of angles serves all layers.
    restarts = restart_mistakes(len(found[0].angles))
    yield from everywhere_and_somewhere(map(_in_layer, restarts), layers, module)


def _of_frequencies(some: Sequence[Rotation]) -> list[Mistake[Rotation]]:
    """Of rotations of one kind."""
    return [*_frequencies(some[0]), *scaling_mistakes(some), *grid_mistakes(some[0])]


@dataclass(frozen=True)
class _Layer:
    """The rotations of one attention's query and key."""

    name: str
    rotations: tuple[Rotation, ...]


def _by_layer(found: Sequence[Rotation]) -> list[_Layer]:
    layers: dict[Site | None, list[Rotation]] = {}
    for one in found:
        layers.setdefault(one.attention, []).append(one)
    modules = [site[0] if site is not None else "" for site in layers]
    names = modules if len(set(modules)) == len(modules) else [f"attention {i}" for i in range(1, len(modules) + 1)]
    return [_Layer(name, tuple(some)) for name, some in zip(names, layers.values(), strict=True)]


def _by_kind(found: Sequence[Rotation]) -> list[list[Rotation]]:
    """Those that turn the same channels alike: a model's local layers may have another base than its global ones."""
    kinds: dict[object, list[Rotation]] = {}
    for one in found:
        kinds.setdefault((one.form, one.start, one.rotary, one.base), []).append(one)
    return list(kinds.values())


def _together(layers: Sequence[_Layer]) -> str:
    """Their names, for a message."""
    first, *others = (layer.name for layer in layers)
    return f"{first} and {len(others)} more like it" if others else first


def _in_layer(mistake: Mistake[Rotation]) -> Mistake[_Layer]:
    """The same with all rotations of a layer."""
    family = mistake.tuned
    return Mistake(
        mistake.title,
        mistake.name,
        mistake.repair,
        lambda layer: [one for rotation in layer.rotations for one in mistake.edits(rotation)],
        mistake.subtle,
        mistake.value,
        None if family is None else lambda value: _in_layer(family(value)),
    )


def _forms(like: Rotation) -> Iterator[Mistake[Rotation]]:
    other: Form = "interleaved" if like.form == "halves" else "halves"
    interleaved = like.form == "interleaved"
    layouts: tuple[tuple[Form, Form, str], ...] = (
        (
            other,
            other,
            f"give TE interleaved={interleaved}, or reorder the rows of query and key by parity.rope_halves; it "
            f"rotates pairs of the {other} form",
        ),
        (
            other,
            like.form,
            f"give TE's layer rotary_pos_interleaved={interleaved}, as its RotaryPositionEmbedding has it; it rotates "
            f"pairs of the {other} form by angles that are laid out for {like.form}",
        ),
        (
            like.form,
            other,
            f"give TE's RotaryPositionEmbedding interleaved={interleaved}, as its layer has it; pairs are of the "
            f"{like.form} form, but angles are laid out for {other}",
        ),
    )
    for form, table_form, repair in layouts:
        by = "" if form == table_form else f", by angles of {table_form}"
        yield Mistake("rope-layout", f"rope {form}{by}", repair, _with(form=form, table_form=table_form))
    yield Mistake(
        "rope-missing",
        "rope missing",
        "pass TE rotary_pos_emb; nothing is rotated",
        _with(times=0),
    )
    for role, lacking in (("query", "key"), ("key", "query")):
        yield Mistake(
            "rope-one-side",
            f"rope on the {role} alone",
            f"rotate both query and key; the {lacking} is not rotated",
            _on(lacking, times=0),
        )
    yield Mistake(
        "rope-twice",
        "rope twice",
        "rotate query and key once; they are rotated twice",
        _with(times=2),
    )
    yield Mistake(
        "rope-direction",
        "rope backwards",
        "rotate by positive angles; query and key are turned the other way",
        lambda one: one.edits(angles=-one.angles),
    )


def _frequencies(like: Rotation) -> Iterator[Mistake[Rotation]]:
    if like.base is None:
        return
    yield from map(_base_instead(like.base), BASES)
    for share in _SHARES:
        if like.start == 0 and int(like.head_dim * share) != like.rotary:
            yield Mistake(
                "rope-partial",
                f"rope on {share:g} of the channels",
                f"give TE rotary_percent={like.rotary / like.head_dim:g}; it rotates {share:g} of a head's channels",
                _with_frequencies(like.base, share),
            )


def _base_instead(right: float) -> Callable[[float], Mistake[Rotation]]:
    def with_base(base: float) -> Mistake[Rotation]:
        return Mistake(
            "rope-base",
            f"rope base={base:.4g}",
            f"give TE rotary_base={right:g}; it rotates with base {base:.4g}",
            _with_frequencies(base),
            value=base,
            tuned=with_base,
        )

    return with_base


def _rounded(dtype: torch.dtype) -> Iterator[Mistake[Rotation]]:
    """Frequencies, phases or the table of too few bits."""
    for low in low_dtypes(dtype):
        # BF16 in an FP16 port is no subtle mistake.
        subtle = dtype in (low, torch.float32)
        for described, phases in _rounded_phases(low).items():
            yield Mistake(
                "rope-precision",
                f"rope {described}",
                f"compute rotary frequencies and phases in FP32, not under autocast and before "
                f".to({str(low).removeprefix('torch.')}); it has {described}",
                with_angles(phases),
                subtle,
            )
        yield Mistake(
            "rope-precision",
            f"rope cosines and sines in {short(low)}",
            f"keep rotary cosines and sines in FP32; they are rounded to {short(low)}",
            _with(table=low),
            subtle,
        )
    yield Mistake(
        "rope-precision",
        "rope phases from a TF32 product",
        "multiply rotary positions and frequencies in FP32, elementwise or with allow_tf32 off; it has phases from a "
        "TF32 product",
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


def _with(**changes: object) -> Edits:
    return lambda one: one.edits(**changes)


def _on(role: str, **changes: object) -> Edits:
    return lambda one: one.edits(**changes) if one.role == role else ()


def _with_frequencies(base: float, share: float | None = None) -> Edits:
    """Frequencies of another base, on a share of the channels or on as many as are rotated."""

    def edits(one: Rotation) -> tuple[Edit, ...]:
        if one.phases is None:
            return ()
        rotary = one.rotary if share is None else int(one.head_dim * share) // 2 * 2
        if rotary == one.rotary and one.base is not None and math.isclose(base, one.base, rel_tol=1e-3):
            return ()
        return one.edits(angles=one.phases[0][:, None] * frequencies(base, rotary).to(one.angles.device))

    return edits


def _tf32(x: Tensor) -> Tensor:
    return tf32(x.float()).double()
