"""Finds the columns of a candidate's value among those of all values that its reference computes.

Names do not pair values, their columns do. They are compared by random projections.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.diagnosis.divergence.noise import Place, places
from parity.watching.trace import Trace

MOST_NOISE = 0.3
"""Of a value, beyond which it is not told from another one."""

MOSTLY = 0.9
"""Of a value's columns, which must be found."""

_NOISE = 5.0  # times what the precision costs a value, within which two values are the same
_UNLIKE = 0.7  # of a value, within which no unrelated value is
_CONSTANT = 1e-6  # of a column's norm, below which what is left without its mean is nothing
_FEWEST_ROWS = 8
_PROJECTIONS = 16


@dataclass(frozen=True)
class _Known:
    """Columns of the reference's values, as many rows each.

    Attributes:
        projected: ``[columns, projections]``.
        near: within which another is the same, ``[columns]``.
        holders: of which value each is.
    """

    projected: Tensor
    near: Tensor
    holders: list[Place]


class Columns:
    """Those of all values of a reference.

    Args:
        trace: of the reference in FP64.
        rounded: its values under the rounding model.
        stored: the dtype to which the candidate rounds a value at least once.
    """

    def __init__(self, trace: Trace, rounded: Mapping[Place, Tensor], stored: torch.dtype) -> None:
        self._values = places(trace)
        self._rounded = rounded
        self._stored = stored
        self._found: dict[tuple[int, bytes], _Known] = {}

    def share(self, x: Tensor, kept: Tensor | None = None) -> float | None:
        """The share of a value's columns that are a column of some traced value; None if that cannot be told.

        Values of more dimensions, such as attention's scores, have layouts of their own and are left out.

        Args:
            x: of the candidate.
            kept: True for the rows that are compared, the shape of ``x`` but for its last dimension; None for all.
        """
        surely, perhaps = [], []
        for same, known in self._same(x, kept):
            surely.append((same & (known.near <= MOST_NOISE)).any(1).double().mean().item())
            perhaps.append(same.any(1).double().mean().item())
        return None if not surely or max(surely) < MOSTLY <= max(perhaps) else max(surely)

    def holders(self, x: Tensor, kept: Tensor) -> Iterator[Place]:
        """The traced values that hold most of a value's columns each, in these rows."""
        for same, known in self._same(x, kept):
            for place in dict.fromkeys(known.holders):
                columns = torch.tensor([holder == place for holder in known.holders])
                if same[:, columns].any(1).double().mean() >= MOSTLY:
                    yield place

    def _same(self, x: Tensor, kept: Tensor | None) -> Iterator[tuple[Tensor, _Known]]:
        """For each layout whether columns of ``x`` are known ones, ``[columns, known]``; none if it cannot be told."""
        if x.dim() not in (2, 3):
            return
        for exchanged in (False, True)[: x.dim() - 1]:
            layout = x.transpose(0, 1) if exchanged else x
            rows = None if kept is None else (kept.T if exchanged else kept).flatten()
            known = self._of_rows(x.shape[:-1].numel(), rows)
            columns = _varying(_projected(_flat(layout, rows)))
            if not len(columns) or not len(known.near):
                return
            yield torch.cdist(columns, known.projected) <= known.near.clamp(max=_UNLIKE), known

    def _of_rows(self, rows: int, kept: Tensor | None) -> _Known:
        """The columns of all values that have so many rows, and what the precision costs them."""
        key = rows, b"" if kept is None else kept.cpu().numpy().tobytes()
        if key not in self._found:
            self._found[key] = self._columns(rows, kept)
        return self._found[key]

    def _columns(self, rows: int, kept: Tensor | None) -> _Known:
        count = rows if kept is None else int(kept.sum())
        values = {place: y for place, y in self._values.items() if count >= _FEWEST_ROWS and _has_rows(y, rows)}
        if not values:
            return _Known(torch.empty(0, _PROJECTIONS), torch.empty(0), [])
        exact = {place: _projected(_flat(y, kept)) for place, y in values.items()}
        least = _NOISE * torch.finfo(self._stored).eps / 2
        near = [
            _cost(columns, values[place], self._rounded.get(place), kept).clamp(min=least)
            for place, columns in exact.items()
        ]
        told = torch.cat(near)
        told = told[told <= MOST_NOISE]
        # In FP32 a reference may make other casts than in FP64; these values are taken for as noisy as others may be.
        unknown = told.max().item() if len(told) else MOST_NOISE
        varying = {place: _varying(columns) for place, columns in exact.items()}
        return _Known(
            torch.cat(list(varying.values())),
            torch.cat(near).nan_to_num(nan=unknown),
            [place for place, columns in varying.items() for _ in columns],
        )


def random_directions(size: int) -> Tensor:
    """``[size, projections]`` in FP64, the same for each size."""
    return torch.randn(size, _PROJECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _flat(x: Tensor, kept: Tensor | None) -> Tensor:
    """``[rows, columns]``, the rows that are kept."""
    rows = x.flatten(0, -2)
    return rows if kept is None else rows[kept.to(x.device)]


def _cost(exact: Tensor, value: Tensor, model: Tensor | None, kept: Tensor | None) -> Tensor:
    """Within which another column is the same as each of a value's that varies; NaN where the model has no such value.

    Args:
        exact: the value's columns, projected.
        value: of the reference in FP64.
        model: the same under the rounding model.
        kept: as in ``Columns.share``, flat.
    """
    varies = exact.any(1)
    if model is None or model.shape != value.shape:
        return torch.full((int(varies.sum()),), math.nan, dtype=torch.float64)
    apart = torch.linalg.vector_norm(_projected(_flat(model, kept)) - exact, dim=1)[varies]
    return _NOISE * torch.maximum(apart, apart.square().mean().sqrt())


def _varying(columns: Tensor) -> Tensor:
    return columns[columns.any(1)]


def _has_rows(y: Tensor, rows: int) -> bool:
    return y.is_floating_point() and y.dim() > 1 and y.numel() == rows * y.shape[-1]


def _projected(x: Tensor) -> Tensor:
    """``[columns, projections]`` of ``[rows, columns]``, each column without its mean, of norm 1 or 0."""
    x = x.double()
    centred = x - x.mean(0)
    norm = torch.linalg.vector_norm(centred, dim=0)
    varies = norm > _CONSTANT * torch.linalg.vector_norm(x, dim=0)
    scaled = torch.where(varies, centred / norm.clamp(min=1e-300), 0.0)
    return (scaled.T @ random_directions(len(x)).to(x.device)).cpu() / math.sqrt(_PROJECTIONS)
