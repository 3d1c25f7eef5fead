"""What ports get wrong about rotary position embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from parity.diagnosis.calls import Edit, Trace
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import Mistake, everywhere_and_somewhere
from parity.diagnosis.rotation import Form, Rotation, frequencies, rotations
from parity.formats import tf32

BASES = (10_000.0, 500_000.0, 1_000_000.0, 100_000.0, 1_000.0)
"""Of Llama, Llama 3, Qwen, and others between them."""

_BF16 = torch.bfloat16
_SHARES = (0.25, 0.5, 0.75, 1.0)

Edits = Callable[[Rotation], tuple[Edit, ...]]


def rope_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with the reference's rotary embeddings."""
    found = rotations(trace)
    if found:
        mistakes = [*_forms(found[0]), *_positions(), *_frequencies(found[0]), *_rounded()]
        yield from everywhere_and_somewhere(mistakes, found, module)


def _forms(like: Rotation) -> Iterator[Mistake[Rotation]]:
    other: Form = "interleaved" if like.form == "halves" else "halves"
    yield Mistake(
        "rope-layout",
        f"rope {other}",
        f"give TE interleaved={like.form == 'interleaved'}, or reorder the rows of query and key by "
        f"parity.rope_halves; it rotates pairs of the {other} form",
        lambda one: one.edits(form=other),
    )
    yield Mistake(
        "rope-missing",
        "rope missing",
        "pass TE rotary_pos_emb; nothing is rotated",
        lambda one: one.edits(times=0),
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
        lambda one: one.edits(times=2),
    )
    yield Mistake(
        "rope-direction",
        "rope backwards",
        "rotate by positive angles; query and key are turned the other way",
        lambda one: one.edits(angles=-one.angles),
    )


def _positions() -> Iterator[Mistake[Rotation]]:
    """Positions counted otherwise; the same for query and key would change nothing."""
    for role in ("query", "key"):
        for by in (-1, 1):
            yield Mistake(
                "rope-position",
                f"rope positions of the {role} off by {by:+d}",
                f"count positions of query and key alike; the {role}'s are off by {by:+d}",
                _turned_more(role, by),
            )
    for factor in (2, 4, 8):
        yield Mistake(
            "rope-position",
            f"rope positions divided by {factor}",
            f"leave out seq_len_interpolation_factor={factor}; positions are divided by it",
            _with_angles(lambda one, factor=factor: one.positions[:, None] / factor * one.frequencies),  # type: ignore[misc]
        )


def _frequencies(like: Rotation) -> Iterator[Mistake[Rotation]]:
    if like.base is None:
        return
    for base in BASES:
        if not math.isclose(base, like.base, rel_tol=0.01):
            yield Mistake(
                "rope-base",
                f"rope base={base:g}",
                f"give TE rotary_base={like.base:g}; it rotates with base {base:g}",
                _with_frequencies(base, 1.0, like),
            )
    for share in _SHARES:
        if int(like.head_dim * share) != like.rotary:
            yield Mistake(
                "rope-partial",
                f"rope on {share:g} of the channels",
                f"give TE rotary_percent={like.rotary / like.head_dim:g}; it rotates {share:g} of a head's channels",
                _with_frequencies(like.base, share, None),
            )


def _rounded() -> Iterator[Mistake[Rotation]]:
    """Frequencies or phases of too few bits."""
    variants: dict[str, Callable[[Rotation], Tensor]] = {
        "frequencies in bf16": lambda one: one.positions[:, None] * _in(_BF16, one.frequencies),
        "phases in bf16": lambda one: _in(_BF16, one.positions[:, None] * one.frequencies),
        "positions in bf16": lambda one: _in(_BF16, one.positions)[:, None] * one.frequencies,
        "frequencies and phases in bf16": lambda one: _in(
            _BF16, _in(_BF16, one.positions)[:, None] * _in(_BF16, one.frequencies)
        ),
        "phases from a TF32 product": lambda one: _tf32(one.positions)[:, None] * _tf32(one.frequencies),
    }
    for described, phases in variants.items():
        yield Mistake(
            "rope-precision",
            f"rope {described}",
            f"compute rotary frequencies and phases in FP32, not under autocast and before .to(bfloat16); it has "
            f"{described}",
            _with_angles(phases),
            subtle=True,
        )
    yield Mistake(
        "rope-precision",
        "rope cosines and sines in bf16",
        "keep rotary cosines and sines in FP32; they are rounded to bf16",
        lambda one: one.edits(table=_BF16),
        subtle=True,
    )


def _on(role: str, **changes: object) -> Edits:
    return lambda one: one.edits(**changes) if one.role == role else ()


def _turned_more(role: str, by: int) -> Edits:
    return lambda one: one.edits(angles=one.angles + by * one.frequencies) if one.role == role else ()


def _with_angles(phases: Callable[[Rotation], Tensor]) -> Edits:
    """Other phases, as a difference to the ideal ones: what the reference itself rounds stays."""

    def edits(one: Rotation) -> tuple[Edit, ...]:
        ideal, other = one.positions[:, None] * one.frequencies, phases(one)
        return one.edits(angles=one.angles + other - ideal) if not torch.equal(ideal, other) else ()

    return edits


def _with_frequencies(base: float, share: float, like: Rotation | None) -> Edits:
    """Frequencies of another base, on a share of the channels or on as many as ``like`` rotates."""

    def edits(one: Rotation) -> tuple[Edit, ...]:
        rotary = like.rotary if like else int(one.head_dim * share) // 2 * 2
        return one.edits(angles=one.positions[:, None] * frequencies(base, rotary), base=base)

    return edits


def _in(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.float().to(dtype).double()


def _tf32(x: Tensor) -> Tensor:
    return tf32(x.float()).double()
