"""Read from a weight map which output columns of the candidate's linear layers are which of the reference's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.case import transfer
from parity.case.weight_map import Shape, WeightMap, linear_part, names


@dataclass(frozen=True)
class WeightRows:
    """What one matrix of the candidate's holds of the reference's.

    Attributes:
        size: how many columns a linear layer with this matrix returns.
        columns: by the reference's parameter, the column that holds each of its own output columns, ``[out]``.
    """

    size: int
    columns: Mapping[str, Tensor]


def weight_rows(
    weights: WeightMap, candidate: Mapping[str, Shape], reference: Mapping[str, Shape]
) -> dict[str, WeightRows]:
    """Return for each matrix of the candidate's which of its rows hold which output of the reference's parameters.

    The number of each row is sent through the inverse of the map, so stacked, interleaved and permuted weights come out
    as they are. Parameters that are mixed along their inputs are left out.

    Args:
        weights: the map.
        candidate: the shapes of TE's parameters, by name.
        reference: the shapes of the reference's parameters, by name.
    """
    found: dict[str, WeightRows] = {}
    for left, right in weights.items():
        linear = {linear_part(left): linear_part(right)}
        for name in names(right):
            if len(candidate[name]) != 2:
                continue
            rows = {other: torch.full(candidate[other], -1.0, dtype=torch.float64) for other in names(right)}
            rows[name] = torch.arange(candidate[name][0], dtype=torch.float64)[:, None].expand(candidate[name]).clone()
            back = transfer.to_reference(linear, rows, reference)
            columns = {theirs: _columns_of(x) for theirs, x in back.items() if x.dim() == 2}
            known = {theirs: x for theirs, x in columns.items() if x is not None}
            if known:
                found[name] = WeightRows(candidate[name][0], known)
    return found


def _columns_of(rows: Tensor) -> Tensor | None:
    """Return the candidate's row for each output of a parameter; None if an output is made of several or of none."""
    for x in (rows, rows.T):
        first = x[:, 0]
        if bool((x == first[:, None]).all()) and bool((first >= 0).all()):
            return first.long()
    return None
