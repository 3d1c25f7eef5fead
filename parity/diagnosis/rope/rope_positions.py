"""Positions by which ports rotate, counted otherwise than the reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parity.diagnosis.mistake import Mistake
from parity.diagnosis.rope.rotation import Rotation
from parity.watching.trace import Edit

Edits = Callable[[Rotation], tuple[Edit, ...]]
Phases = Callable[[Tensor, Tensor], Tensor]  # from positions and frequencies to angles


def position_mistakes() -> Iterator[Mistake[Rotation]]:
    """Positions counted otherwise; the same for query and key would change nothing."""
    for role in ("query", "key"):
        for by in (-1, 1):
            yield Mistake(
                "rope-position",
                f"rope positions of the {role} off by {by:+d}",
                f"count positions of query and key alike; the {role}'s are off by {by:+d}",
                _turned_more(role, by),
            )
    for by in (-1, 1):
        yield Mistake(
            "rope-position",
            f"rope positions off by {by:+d}",
            f"rotate by the reference's positions, where a cache has keys that were rotated before (start_positions); "
            f"they are off by {by:+d}",
            with_angles(lambda positions, frequency, by=by: (positions[:, None] + by) * frequency),  # type: ignore[misc]
        )
    yield from map(_divided_by, (2.0, 4.0, 8.0))
    yield Mistake(
        "rope-position",
        "rope positions counted through",
        "give TE angles of the reference's positions as rotary_pos_emb; they are counted from the first token on, "
        "where the reference's begin again, or skip or repeat some",
        with_angles(lambda positions, frequency: torch.arange(len(positions)).to(positions)[:, None] * frequency),
    )


def restart_mistakes(seq: int) -> Iterator[Mistake[Rotation]]:
    """Positions that begin again after a usual length, where the reference counts through."""
    yield from map(_beginning_again, _usual_lengths(seq))


def _usual_lengths(seq: int) -> list[int]:
    """After which positions may begin again: parts of the sequence, and powers of two; few, however long it is."""
    powers = (1 << exponent for exponent in range(1, seq.bit_length()))
    lengths = dict.fromkeys((*(seq // parts for parts in (2, 3, 4, 8)), *powers))
    return [length for length in lengths if 1 < length < seq]


def _beginning_again(length: int) -> Mistake[Rotation]:
    return Mistake(
        "rope-position",
        f"rope positions modulo {length}",
        f"rotate by the reference's positions; they begin again after each {length}",
        with_angles(lambda positions, frequency: (positions % length)[:, None] * frequency),
    )


def counted_from(starts: Sequence[int]) -> Edits:
    """Positions are to be counted from 0 at each of these; the first is 0."""

    def phases(positions: Tensor, frequency: Tensor) -> Tensor:
        place = torch.arange(len(positions), device=positions.device)
        first = torch.tensor(starts, device=positions.device)
        since = place - first[torch.bucketize(place, first, right=True) - 1]
        return since.to(positions)[:, None] * frequency

    return with_angles(phases)


def in_rows(one: Edit, rows: Sequence[int]) -> Edit:
    """The edit in these rows of the batch, the first dimension of what the call returns, and nowhere else."""

    def compute(was: Tensor, *values: Tensor) -> Tensor:
        chosen = torch.zeros(len(was), dtype=torch.bool, device=was.device)
        chosen[list(rows)] = True
        return torch.where(chosen.view(-1, *[1] * (was.dim() - 1)), one.compute(was, *values), was)

    return replace(one, compute=compute)


def _divided_by(factor: float) -> Mistake[Rotation]:
    return Mistake(
        "rope-position",
        f"rope positions divided by {factor:.4g}",
        f"leave out seq_len_interpolation_factor={factor:.4g}; positions are divided by it",
        with_angles(lambda positions, frequency: positions[:, None] / factor * frequency),
        value=factor,
        tuned=_divided_by,
    )


def _turned_more(role: str, by: int) -> Edits:
    def edits(one: Rotation) -> tuple[Edit, ...]:
        if one.role != role or one.phases is None:
            return ()
        return one.edits(angles=one.angles + by * one.phases[1])

    return edits


def with_angles(phases: Phases) -> Edits:
    def edits(one: Rotation) -> tuple[Edit, ...]:
        if one.phases is None:
            return ()
        positions, frequency = one.phases
        angles = phases(positions, frequency)
        return one.edits(angles=angles) if not torch.equal(angles, one.angles) else ()

    return edits
