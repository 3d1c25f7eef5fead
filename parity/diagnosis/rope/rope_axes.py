"""Rotary embeddings of two axes, as of an image's patches: some pairs turn by a patch's row, the others by its column.

A table of angles is recognised by what it holds: behind tokens that are not rotated, such as a class token's or a
text's, each pair's angles are those of a grid's rows or of its columns, and grow evenly along them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.diagnosis.mistake import Mistake
from parity.diagnosis.rope.rotation import Rotation, base_of, frequencies
from parity.watching.trace import Edit

_EXACT = 1e-3  # radians by which angles may differ from those of a grid
_BASES = (100.0, 10_000.0)  # of DINOv3 and EVA-02, and of most others


@dataclass(frozen=True)
class Grid:
    """Of positions, row by row.

    Attributes:
        before: tokens in front of it, which are not rotated.
        height: its rows.
        width: its columns.
        of_rows: which pairs turn by the row, ``[rotary / 2]``.
        first: angles of the first patch, ``[rotary / 2]``, FP64.
        steps: by how much each pair is turned from one row, or column, to the next, ditto.
    """

    before: int
    height: int
    width: int
    of_rows: Tensor
    first: Tensor
    steps: Tensor

    def angles(self, rows: Tensor, columns: Tensor, steps: Tensor | None = None) -> Tensor:
        """Angles of patches by their rows and columns, behind the tokens that are not rotated."""
        places = torch.where(self.of_rows, rows.reshape(-1, 1), columns.reshape(-1, 1)).double()
        turned = self.first + places * (self.steps if steps is None else steps)
        return torch.cat((turned.new_zeros(self.before, turned.shape[-1]), turned))

    @property
    def rows(self) -> Tensor:
        """Of each patch."""
        return torch.arange(self.height * self.width, device=self.first.device) // self.width

    @property
    def columns(self) -> Tensor:
        """Of each patch."""
        return torch.arange(self.height * self.width, device=self.first.device) % self.width


def grid_of(rotation: Rotation) -> Grid | None:
    """The grid by which a rotation turns; None where it turns by one position, or by no grid."""
    angles = rotation.angles.double()
    if rotation.phases is not None or angles.dim() != 2 or len(angles) < 4:
        return None
    unrotated = int((angles.abs() > _EXACT).any(1).long().cumsum(0).eq(0).sum())
    for before in dict.fromkeys((max(unrotated - 1, 0), unrotated)):  # the first patch may be at row and column 0
        count = len(angles) - before
        for height in range(2, count // 2 + 1):
            if count % height == 0:
                grid = _grid(angles[before:], before, height, count // height)
                if grid is not None:
                    return grid
    return None


def grid_mistakes(rotation: Rotation) -> Iterator[Mistake[Rotation]]:
    """What ports get wrong about the two axes of rotations like this one."""
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
        yield Mistake(
            "rope-position",
            f"rope of two axes, {described}",
            f"{right}; {described}",
            _turning(grid, lambda grid, r=other_rows, c=other_columns: grid.angles(r, c)),  # type: ignore[misc]
        )
    of_rows, of_columns = grid.steps[grid.of_rows], grid.steps[~grid.of_rows]
    base = base_of(of_rows / of_rows[0])
    if base is not None and of_rows.shape == of_columns.shape and torch.allclose(of_rows, of_columns, 1e-4):
        for factor in (base, *_BASES):
            yield _base_instead(base)(1.1 * factor if factor == base else factor)


def _base_instead(right: float) -> Callable[[float], Mistake[Rotation]]:
    """Another base of the frequencies along each axis."""

    def with_base(base: float) -> Mistake[Rotation]:
        def angles(grid: Grid) -> Tensor:
            steps = grid.steps.clone()
            for of_axis in (grid.of_rows, ~grid.of_rows):
                of_base = frequencies(base, 2 * int(of_axis.sum())).to(steps.device)
                steps[of_axis] = steps[of_axis][0] * of_base
            return grid.angles(grid.rows, grid.columns, steps)

        return Mistake(
            "rope-base",
            f"rope base={base:.4g} of both axes",
            f"give the frequencies of rows and columns the base {right:g}; it is {base:.4g}",
            lambda one: _edits(one, angles),
            value=base,
            tuned=with_base,
        )

    return with_base


def _turning(grid: Grid, angles: Callable[[Grid], Tensor]) -> Callable[[Rotation], tuple[Edit, ...]]:
    """Edits by angles of a grid; none where they are the rotation's own."""
    if torch.allclose(angles(grid), grid.angles(grid.rows, grid.columns)):
        return lambda one: ()
    return lambda one: _edits(one, angles)


def _edits(rotation: Rotation, angles: Callable[[Grid], Tensor]) -> tuple[Edit, ...]:
    grid = grid_of(rotation)
    return () if grid is None else rotation.edits(angles=angles(grid))


def _grid(angles: Tensor, before: int, height: int, width: int) -> Grid | None:
    """The grid whose angles these are, ``[height * width, rotary / 2]``; None for none."""
    table = angles.reshape(height, width, -1)
    first = table[0, 0]
    down, across = (_wrapped(x - first) for x in (table[1, 0], table[0, 1]))
    of_rows = down.abs() > across.abs()
    if bool(of_rows.all()) or not bool(of_rows.any()):
        return None
    grid = Grid(before, height, width, of_rows, first, torch.where(of_rows, down, across))
    expected = grid.angles(grid.rows, grid.columns)[before:]
    return grid if bool((_wrapped(angles - expected).abs() < _EXACT).all()) else None


def _wrapped(angle: Tensor) -> Tensor:
    return torch.remainder(angle + torch.pi, 2 * torch.pi) - torch.pi
