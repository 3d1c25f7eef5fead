"""Recognise rotary embeddings in a trace, over one axis or several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from parity.mistakes.alternatives import numbers
from parity.mistakes.attention import seeming_attentions
from parity.mistakes.hypothesis import Mistake, rounded_to
from parity.mistakes.usual_numbers import USUAL
from parity.shown import written
from parity.trace.trace import Call, Changed, Edit, Site, Trace, Value, ancestors, instead, once_a_trace

# Rotary position embeddings in a trace.
#
# A rotation is recognised by its effect: a value before a query or a key is an earlier value of the same shape with
# pairs of channels turned by angles that depend only on position and pair. So any code that does this is found, whether
# it uses ``rotate_half``, complex numbers or a cache of cosines.


Form = Literal["halves", "interleaved"]

_MOST_ANCESTORS = 60  # the value before a query's rotation is looked for among this many ancestors
_FARTHEST = 16384  # the position of a single token is looked for up to this one
_FEW_POSITIONS, _MOST_POSITIONS = 32, 1024  # how many tokens are looked at, and the most positions along an axis
_EXACT = 1e-4  # radians by which a rotation in FP32 may differ between heads
_FORMS: tuple[tuple[Form, Form], ...] = (
    ("halves", "halves"),
    ("interleaved", "interleaved"),
    ("interleaved", "halves"),  # DeepSeek's: interleaved channels are taken apart, for query and key alike
    ("halves", "interleaved"),
)  # the forms of the argument and of the result


@dataclass(frozen=True, eq=False)
class Rotation:
    """``result = x`` with pairs of channels turned by ``angles[position, pair]``.

    Attributes:
        call: the call that returns the rotated value.
        x: the value to rotate, ``[..., head_dim]``.
        role: ``query`` or ``key``.
        head_dim: channels of a head.
        form: pairs are ``(i, i + rotary / 2)`` or ``(2 i, 2 i + 1)``, counted from ``start``.
        axis: dimension of the positions, negative.
        angles: ``[seq, rotary / 2]`` in radians, FP64; products of the phases if those are known, else known only up
            to full turns.
        phases: positions ``[seq]`` and frequencies ``[rotary / 2]`` whose products are the angles, FP64; None if they
            are not known.
        start: the first rotated channel.
        result_form: the form in which rotated pairs are returned; None for ``form``.
        times: how often the value is rotated.
        amplitude: the factor of rotated channels, YaRN's mscale (Peng et al., arXiv 2309.00071).
        table: dtype to which cosines and sines are rounded; None for the computation's own.
        table_form: the form for which cosines and sines are laid out over the channels; None for ``form``.
        attention: the first call of attention that reads the rotated value.
        of_axes: frequencies ``[rotary / 2]``, FP64, if pairs are turned by positions along several axes, such as time,
            height and width (Qwen2-VL's, arXiv 2409.12191), and ``phases`` are not known; None otherwise.
    """

    call: Call
    x: Value
    role: Literal["query", "key"]
    head_dim: int
    form: Form
    axis: int
    angles: Tensor
    phases: tuple[Tensor, Tensor] | None
    start: int = 0
    result_form: Form | None = None
    times: int = 1
    amplitude: float = 1.0
    table: torch.dtype | None = None
    table_form: Form | None = None
    attention: Site | None = None
    of_axes: Tensor | None = None

    @property
    def rotary(self) -> int:
        """How many channels are rotated."""
        return 2 * self.angles.shape[-1]

    @property
    def base(self) -> float | None:
        """The base of frequencies ``base ** (-2 i / rotary)``; None if they are others."""
        return base_of(self.phases[1]) if self.phases is not None else None

    def compute(self, x: Tensor) -> Tensor:
        """Return the rotated value."""
        end = self.start + self.rotary
        before, rotated, after = x[..., : self.start], x[..., self.start : end], x[..., end:]
        # In FP32, a phase of thousands of radians is rounded in the reference and in a port alike.
        angles = self.angles.to(x.device, x.dtype).reshape(len(self.angles), *[1] * (-self.axis - 2), self.rotary // 2)
        tables = (rounded_to(table, self.table) for table in (angles.cos(), angles.sin()))
        # The first and second channel of a pair have different cosines if the table is laid out for another form.
        cos, sin = (pairs(_joined(table, table, self.table_form or self.form), self.form) for table in tables)
        for _ in range(self.times):
            first, second = pairs(rotated, self.form)
            rotated = _joined(first * cos[0] - second * sin[0], second * cos[1] + first * sin[1], self.form)
            rotated = rotated * self.amplitude
        rotated = _joined(*pairs(rotated, self.form), self.result_form or self.form)
        return torch.cat((before, rotated, after), -1)

    def edits(self, **changes: Any) -> tuple[Edit, ...]:
        """Return the edits that rotate the value with other attributes."""
        return (instead(self.call, (self.x,), replace(self, **changes).compute, Changed(self, changes)),)


@once_a_trace
def rotations(trace: Trace) -> list[Rotation]:
    """Return the rotation of each attention's query and key, in order."""
    found: dict[int, Rotation] = {}
    for attention in seeming_attentions(trace):  # no slow check is needed, because rotations are checked themselves
        both: tuple[tuple[Value, Literal["query", "key"]], ...] = (attention.query, "query"), (attention.key, "key")
        for value, role in both:
            rotation = _before(trace, value, role)
            if rotation is not None:
                of = attention.call.site
                found.setdefault(rotation.call.outputs[0].number, replace(rotation, attention=of))
    return list(found.values())


def frequencies(base: float, rotary: int) -> Tensor:
    """Return ``base ** (-2 i / rotary)`` for each pair i, FP64 (Su et al., arXiv 2104.09864)."""
    return base ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)


def pairs(x: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return the first and the second channel of each pair, ``[..., rotary / 2]``."""
    if form == "halves":
        first, second = x.chunk(2, -1)
        return first, second
    return x[..., 0::2], x[..., 1::2]


def _joined(first: Tensor, second: Tensor, form: Form) -> Tensor:
    """Return the channels of these pairs; the inverse of ``pairs``."""
    return torch.cat((first, second), -1) if form == "halves" else torch.stack((first, second), -1).flatten(-2)


def _before(trace: Trace, value: Value, role: Literal["query", "key"]) -> Rotation | None:
    """Return the last rotation before a query or key; one that also scales, like YaRN's, only if there is no other."""
    chain = [value, *ancestors(trace, value, _MOST_ANCESTORS)]
    candidates = [v for v in chain if trace.tensor(v).dim() >= 3 and trace.tensor(v).is_floating_point()]
    scaled: list[tuple[Call, Value, float]] = []
    for i, result in enumerate(candidates):
        call = trace.producer(result)
        if call is None or call.outputs != [result]:
            continue
        shape = trace.tensor(result).shape
        for x in candidates[i + 1 :]:
            amplitude = _amplitude(trace, x, result) if trace.tensor(x).shape == shape else None
            if amplitude == 1.0:
                rotation = _turned(trace, call, x, role)
                if rotation is not None:
                    return _taken_apart(trace, rotation, candidates[i + 1 :])
            elif amplitude is not None:
                scaled.append((call, x, amplitude))
    turned = (_turned(trace, call, x, role, amplitude) for call, x, amplitude in scaled)
    return next((rotation for rotation in turned if rotation is not None), None)


def _taken_apart(trace: Trace, rotation: Rotation, earlier: Iterable[Value]) -> Rotation:
    """Return the rotation of the interleaved value that was taken apart into halves before, if there is one."""
    x = trace.tensor(rotation.x)
    if rotation.form == "halves" and rotation.rotary == rotation.head_dim:
        for value in earlier:
            before = trace.tensor(value)
            if before.shape == x.shape and torch.equal(_joined(*pairs(before, "interleaved"), "halves"), x):
                return replace(rotation, x=value, form="interleaved", result_form="halves")
    return rotation


def _amplitude(trace: Trace, x: Value, result: Value) -> float | None:
    """Return the ratio of the heads' norms after and before, if it is the same for all; None otherwise."""
    before, after = (torch.linalg.vector_norm(trace.tensor(value).double(), dim=-1) for value in (x, result))
    if torch.allclose(before, after, rtol=_EXACT):
        return 1.0
    ratio = float(torch.linalg.vector_norm(after) / torch.linalg.vector_norm(before).clamp(min=1e-300))
    return ratio if torch.allclose(ratio * before, after, rtol=_EXACT) else None


def _turned(
    trace: Trace, call: Call, x: Value, role: Literal["query", "key"], amplitude: float = 1.0
) -> Rotation | None:
    """Return the rotation from ``x`` to the result of ``call``; None if there is none."""
    before, after = trace.tensor(x).double(), trace.tensor(call.outputs[0]).double() / amplitude
    if torch.allclose(before, after, rtol=_EXACT):
        return None
    head_dim = before.shape[-1]
    for start, end in _ranges(before != after):
        for form, result_form in _FORMS:
            turned = _angles(before[..., start:end], after[..., start:end], form, result_form)
            if turned is None:
                continue
            axis, angles, is_sure = turned
            if bool((_wrapped(angles - angles[:, :1]).abs() < _EXACT).all()):  # all pairs alike, such as by 90 degrees
                continue
            phases = _phases(trace, call, angles)
            if phases is None and not is_sure:
                continue
            of_axes = _of_axes(trace, call, angles) if phases is None else None
            angles = angles if phases is None else phases[0][:, None] * phases[1]
            return Rotation(
                *(call, x, role, head_dim, form, axis, angles, phases, start, result_form),
                amplitude=amplitude,
                of_axes=of_axes,
            )
    return None


def _ranges(differ: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the ranges of channels that may be rotated: from the first to the last that differ, or the whole head."""
    channels = differ.flatten(0, -2).any(0).nonzero().flatten().tolist()
    changed, head = (channels[0], channels[-1] + 1), (0, differ.shape[-1])
    yield from (ends for ends in dict.fromkeys((changed, head)) if (ends[1] - ends[0]) % 2 == 0)


def _angles(before: Tensor, after: Tensor, form: Form, result_form: Form) -> tuple[int, Tensor, bool] | None:
    """Return the positions' dimension, the angle of each position and pair, and whether several heads agree on it.

    Return None if this is not a rotation.
    """
    a, b = pairs(before, form)
    c, d = pairs(after, result_form)
    cos, sin, square = a * c + b * d, a * d - b * c, (a * a + b * b).clamp(min=1e-300)
    significant = square > 1e-6 * square.mean()
    if not torch.allclose((c * c + d * d)[significant], square[significant], rtol=1e-3):
        return None
    angles = torch.atan2(sin, cos)
    axes = range(-2, -angles.dim() - 1, -1)
    for axis in sorted(axes, key=lambda axis: angles.shape[axis] < 2):  # a single position, as in decoding, comes last
        by_position = angles.movedim((axis, -1), (0, 1)).flatten(2)  # [seq, pairs, everything else]
        weights = square.movedim((axis, -1), (0, 1)).flatten(2)
        best = weights.argmax(-1, keepdim=True)
        common = by_position.gather(-1, best)
        off = _wrapped(by_position - common).abs()
        if len(common) > 1 and bool((_wrapped(common - common[:1]).abs() < _EXACT).all()):
            continue  # this is the dimension of heads or of the batch, which all have the same position
        if bool((off[weights > 1e-3 * weights.mean()] < _EXACT).all()):
            return axis, common.squeeze(-1), off.shape[-1] > 1
    return None


def _phases(trace: Trace, call: Call, angles: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return positions and frequencies whose products are the angles, up to full turns; None if there are none.

    Both are looked for among the values that the rotation is computed from. If its sines come from a cache, positions
    are counted from 0, and frequencies are those of a base or are measured from the angles.
    """
    seq, count = angles.shape
    near = [trace.tensor(value) for value in ancestors(trace, call.outputs[0], _MOST_ANCESTORS)]
    flat = [x.detach().double().flatten() for x in near if x.numel() in (seq, count) and not x.is_complex()]
    positions = [x for x in flat if x.numel() == seq and torch.equal(x, x.round())]
    frequencies_found = [x for x in flat if x.numel() == count]
    if seq == 1:
        positions.append(torch.arange(_FARTHEST, dtype=torch.float64, device=angles.device))
        usual = [frequencies(base, 2 * count) for base in USUAL.rope_bases]
        of_bases = [x for x in frequencies_found if bool((x > 0.0).all()) and float(x.max()) == 1.0]
        return _single(angles, positions, [*of_bases, *usual, *frequencies_found])
    positions.append(torch.arange(seq, dtype=torch.float64, device=angles.device))
    last = float(_wrapped(angles[1] - angles[0])[-1])
    if count > 1 and last > 0.0:
        measured = last ** (-count / (count - 1))
        frequencies_found += [frequencies(base, 2 * count) for base in (round(measured, -2), measured)]
    frequencies_found.append(_slopes(angles))
    for position in positions:
        for frequency in frequencies_found:
            expected = position[:, None] * frequency.to(position.device)
            if bool((_wrapped(angles - expected).abs() < 10 * _EXACT).all()):
                return position, frequency
    return None


def _of_axes(trace: Trace, call: Call, angles: Tensor) -> Tensor | None:
    """Return frequencies that give the angles with whole positions, which may differ by pair; None if none do."""
    some = angles[:: max(len(angles) // _FEW_POSITIONS, 1)]
    positions = torch.arange(min(4 * len(angles), _MOST_POSITIONS), dtype=torch.float64, device=angles.device)
    for value in ancestors(trace, call.outputs[0], _MOST_ANCESTORS):
        frequency = trace.tensor(value).detach().flatten()
        if frequency.numel() == angles.shape[1] and frequency.is_floating_point() and frequency.max() == 1.0:
            made = frequency.double()[:, None] * positions
            if bool((_wrapped(some[..., None] - made).abs().amin(-1) < 10 * _EXACT).all()):
                return frequency.double()
    return None


def _single(
    angles: Tensor, positions: Sequence[Tensor], frequencies_found: Sequence[Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return the first position and frequencies that fit the angles ``[1, rotary / 2]`` of a single position."""
    for frequency in frequencies_found:
        for some in positions:
            off = _wrapped(angles - some[:, None] * frequency.to(angles.device)).abs().amax(-1)
            if bool((off < 10 * _EXACT).any()):
                return some[off.argmin()][None], frequency
    return None


def _slopes(angles: Tensor) -> Tensor:
    """Return the angle of each pair from one position to the next, if it is the same everywhere."""
    slopes, step = _wrapped(angles[1] - angles[0]), 1
    while step < len(angles):  # the steps are small enough to miss no full turn, and each makes the slopes more exact
        slopes = slopes + _wrapped(angles[step] - angles[0] - step * slopes) / step
        step *= 2
    return slopes


def base_of(frequency: Tensor) -> float | None:
    """Return the base of frequencies ``base ** (-2 i / rotary)``; None if they are others."""
    count = len(frequency)
    if count < 2 or float(frequency[-1]) <= 0.0:
        return None
    measured = float(frequency[-1]) ** (-count / (count - 1))
    rounded = round(measured, 2 - math.floor(math.log10(measured)))
    fits = (base for base in (rounded, measured) if torch.allclose(frequencies(base, 2 * count), frequency.cpu(), 1e-5))
    return next(fits, None)


def _wrapped(angle: Tensor) -> Tensor:
    """Return the same angle between -pi and pi."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


# Rotations by other angles.


Edits = Callable[[Rotation], tuple[Edit, ...]]
Phases = Callable[[Tensor, Tensor], Tensor]  # maps positions and frequencies to angles
Positions = Callable[[Tensor], Tensor]  # maps the reference's positions to a port's


def with_angles(phases: Phases) -> Edits:
    """Return the edits that rotate by other angles, computed from the reference's positions and frequencies."""

    def edits(one: Rotation) -> tuple[Edit, ...]:
        angles = one.angles if one.phases is None else phases(*one.phases)
        return one.edits(angles=angles) if not torch.equal(angles, one.angles) else ()

    return edits


def with_positions(change: Positions) -> Edits:
    """Return the edits that rotate by other positions."""
    return with_angles(lambda positions, frequency: change(positions)[:, None] * frequency)


def counted_from(starts: Sequence[int]) -> Edits:
    """Return the edits that count positions from 0 at each of these places, the first of which is 0."""

    def since(positions: Tensor) -> Tensor:
        place = torch.arange(len(positions), device=positions.device)
        first = torch.tensor(starts, device=positions.device)
        return (place - first[torch.bucketize(place, first, right=True) - 1]).to(positions)

    return with_positions(since)


def counted_as(own: Tensor) -> Edits:
    """Return the edits that give the tokens of the sequence these positions, ``[seq]``."""
    return with_positions(own.to)


# Rotary embeddings over two axes, such as those of image patches: some pairs turn by the row, others by the column.
#
# A table of angles is recognised by its values. After tokens that are not rotated, such as a class token or a text,
# each pair's angles grow evenly along a grid's rows or along its columns.


_EXACT_ANGLE = 1e-3  # radians by which angles may differ from a grid's


@dataclass(frozen=True)
class Grid:
    """A grid of positions, row by row.

    Attributes:
        before: the number of tokens before it, which are not rotated.
        height: the number of rows.
        width: the number of columns.
        of_rows: which pairs turn by the row, ``[rotary / 2]``.
        first: angles of the first patch, ``[rotary / 2]``, FP64.
        steps: each pair's angle from one row or column to the next, ``[rotary / 2]``, FP64.
    """

    before: int
    height: int
    width: int
    of_rows: Tensor
    first: Tensor
    steps: Tensor

    def angles(self, rows: Tensor, columns: Tensor, steps: Tensor | None = None) -> Tensor:
        """Return the angles of unrotated tokens, which are 0, and of patches in these rows and columns."""
        places = torch.where(self.of_rows, rows.reshape(-1, 1), columns.reshape(-1, 1)).double()
        turned = self.first + places * (self.steps if steps is None else steps)
        return torch.cat((turned.new_zeros(self.before, turned.shape[-1]), turned))

    @property
    def rows(self) -> Tensor:
        """The row of each patch."""
        return torch.arange(self.height * self.width, device=self.first.device) // self.width

    @property
    def columns(self) -> Tensor:
        """The column of each patch."""
        return torch.arange(self.height * self.width, device=self.first.device) % self.width


def grid_of(rotation: Rotation) -> Grid | None:
    """Return the grid by which a rotation turns; None if it turns by one position or not by a grid."""
    angles = rotation.angles.double()
    if rotation.phases is not None or angles.dim() != 2 or len(angles) < 4:
        return None
    unrotated = int((angles.abs() > _EXACT_ANGLE).any(1).long().cumsum(0).eq(0).sum())
    for before in dict.fromkeys((max(unrotated - 1, 0), unrotated)):  # the first patch may be at row and column 0
        count = len(angles) - before
        for height in range(2, count // 2 + 1):
            if count % height == 0:
                grid = _grid(angles[before:], before, height, count // height)
                if grid is not None:
                    return grid
    return None


def grid_mistakes(rotation: Rotation) -> Iterator[Mistake[Rotation]]:
    """Yield mistakes in the two axes of rotations like this one."""
    grid = grid_of(rotation)
    if grid is None:
        return
    rows, columns = grid.rows, grid.columns
    right = "rotate each patch by its row and its column as the reference does"
    count = torch.arange(len(rows), device=rows.device)
    others = {
        "rows and columns are exchanged": (columns, rows),
        "patches are counted column by column": (count % grid.height, count // grid.height),
        "height and width are exchanged": (count // grid.height, count % grid.height),
        "both are the number of the patch": (count, count),
        "both are the row": (rows, rows),
        "both are the column": (columns, columns),
        "rows begin at 1": (rows + 1, columns),
        "rows are counted from below": (grid.height - 1 - rows, columns),
    }
    for described, (other_rows, other_columns) in others.items():
        turned: Callable[[Grid], Tensor] = lambda grid, r=other_rows, c=other_columns: grid.angles(r, c)  # type: ignore[misc]  # noqa: E731
        if not torch.allclose(turned(grid), grid.angles(rows, columns)):
            name, repair = f"rope of two axes, {described}", f"{right}; {described}"
            yield Mistake("rope-position", name, repair, partial(_edits, turned))
    of_rows, of_columns = grid.steps[grid.of_rows], grid.steps[~grid.of_rows]
    base = base_of(of_rows / of_rows[0])
    if base is not None and of_rows.shape == of_columns.shape and torch.allclose(of_rows, of_columns, 1e-4):
        yield from numbers(partial(_base_instead, base), [base], USUAL.grid_rope_bases)


def _base_instead(right: float, base: float) -> Mistake[Rotation]:
    """Return the mistake of another base for the frequencies along each axis."""

    def angles(grid: Grid) -> Tensor:
        steps = grid.steps.clone()
        for of_axis in (grid.of_rows, ~grid.of_rows):
            of_base = frequencies(base, 2 * int(of_axis.sum())).to(steps.device)
            steps[of_axis] = steps[of_axis][0] * of_base
        return grid.angles(grid.rows, grid.columns, steps)

    repair = f"give the frequencies of rows and columns the base {written(right, 7)}; the port's is {written(base)}"
    return Mistake("rope-base", f"rope base={written(base)} of both axes", repair, partial(_edits, angles))


def _edits(angles: Callable[[Grid], Tensor], rotation: Rotation) -> tuple[Edit, ...]:
    grid = grid_of(rotation)
    return () if grid is None else rotation.edits(angles=angles(grid))


def _grid(angles: Tensor, before: int, height: int, width: int) -> Grid | None:
    """Return the grid that has these angles, ``[height * width, rotary / 2]``; None if there is none."""
    table = angles.reshape(height, width, -1)
    first = table[0, 0]
    down, across = (_wrapped(x - first) for x in (table[1, 0], table[0, 1]))
    of_rows = down.abs() > across.abs()
    if bool(of_rows.all()) or not bool(of_rows.any()):
        return None
    grid = Grid(before, height, width, of_rows, first, torch.where(of_rows, down, across))
    expected = grid.angles(grid.rows, grid.columns)[before:]
    return grid if bool((_wrapped(angles - expected).abs() < _EXACT_ANGLE).all()) else None
