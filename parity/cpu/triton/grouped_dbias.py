"""Bias gradients of several groups of rows in one call.

Stands in for the wrappers of ``transformer_engine/pytorch/triton/grouped_dbias_dscales.py`` (2.16.1 to 2.20.2), whose
kernel is Triton's. All sums are FP32.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["compute_grouped_dbias", "compute_grouped_dbias_dscales"]


@torch.no_grad()
def compute_grouped_dbias(dy: Tensor, offsets: Tensor, num_groups: int, dbias: Tensor | None = None) -> Tensor:
    """Add the sum of each group's rows to ``dbias``.

    Args:
        dy: ``[rows, hidden]``; rows beyond the last group do not count.
        offsets: int64 ``[num_groups + 1]``, from 0: where the groups begin and end.
        dbias: FP32 ``[num_groups, hidden]``. Default: zeros.
    """
    if dbias is None:
        dbias = torch.zeros(num_groups, dy.shape[1])
    group = _groups(offsets)
    return dbias.index_add_(0, group, dy[: len(group)].float())


@torch.no_grad()
def compute_grouped_dbias_dscales(
    dy: Tensor,
    scales: Tensor,
    bias: Tensor,
    offsets: Tensor,
    dbias: Tensor | None = None,
    dscales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the gradients of a bias and of a scale, where each group's output is ``(product + bias) * scale``.

    Args:
        dy: ``[rows, hidden]``; rows beyond the last group do not count.
        scales: FP32 ``[rows]``.
        bias: ``[groups, hidden]``.
        offsets: int64 ``[groups + 1]``, from 0: where the groups begin and end.
        dbias: FP32 ``[groups, hidden]``. Default: zeros.
        dscales: FP32 ``[rows]``, what the product adds to it. Default: zeros.
    """
    if dbias is None:
        dbias = torch.zeros(bias.shape)
    if dscales is None:
        dscales = torch.zeros(len(dy))
    group = _groups(offsets)
    rows = dy[: len(group)].float()
    dbias.index_add_(0, group, rows * scales[: len(group), None])
    dscales[: len(group)] += (rows * bias[group].float()).sum(1)
    return dbias, dscales


def _groups(offsets: Tensor) -> Tensor:
    """The group of each row, int64."""
    return torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
