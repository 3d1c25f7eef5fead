"""Cross entropy over a vocabulary that may be split over ranks.

Stands in for the wrappers of ``transformer_engine/pytorch/triton/cross_entropy.py`` (2.19 to 2.20.2), whose kernels are
Triton's (``common/triton/cross_entropy.py``): losses and gradients are FP32, whatever the dtype of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["cross_entropy_backward", "cross_entropy_forward"]


@dataclass(frozen=True)
class Statistics:
    """What a row of logits is reduced to, over all ranks.

    Attributes:
        stats: FP32 ``[rows, 2]``: the largest logit, and the sum of the exponentials relative to it.
        of_target: FP32 ``[rows]``: the target's logit, ``-inf`` if the target is no token.
        total: FP32 ``[rows]``: the sum of the logits.
    """

    stats: Tensor
    of_target: Tensor
    total: Tensor


@torch.no_grad()
def cross_entropy_forward(
    _input: Tensor,
    target: Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    dist_process_group: Any,
    ignore_idx: int,
    overwrite_input: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, int, int]:
    """Return the loss of each row, or their mean over the rows that count.

    Args:
        _input: this rank's part of the logits, ``[batch, sequence, vocabulary]``, FP32 or BF16.
        target: int64, a token for each row; ``ignore_idx`` makes a loss of 0.
        label_smoothing: how much of the target's weight goes to all tokens alike.
        reduce_loss: average over the rows that are not ignored; else ``[batch, sequence]``.
        overwrite_input: save the logits themselves for the backward pass, not a copy.

    Returns:
        The loss (FP32; ``[1]`` if reduced), and what ``cross_entropy_backward`` needs: the saved logits,
        ``Statistics.stats``, the target, the number of rows that count or None, this rank and the number of ranks.
    """
    rank, ranks = rank_and_size(dist_process_group)
    batch, sequence, vocabulary = _input.shape
    target = target.contiguous()
    tokens = target.view(-1)
    row = statistics(_input.reshape(-1, vocabulary), tokens, rank, ranks, dist_process_group)
    losses = row_losses(row, vocabulary * ranks, label_smoothing).masked_fill_(tokens == ignore_idx, 0.0)
    saved = _input if overwrite_input else _input.clone(memory_format=torch.contiguous_format)
    if not reduce_loss:
        return losses.view(batch, sequence), saved, row.stats, target, None, rank, ranks
    count = counted_rows(tokens, ignore_idx)
    return losses.sum() / count, saved, row.stats, target, count, rank, ranks


@torch.no_grad()
def cross_entropy_backward(
    saved_input: Tensor,
    stats: Tensor,
    target: Tensor,
    n_non_ignore: Tensor | None,
    grad_output: Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    rank: int,
    world_size: int,
    ignore_idx: int,
) -> Tensor:
    """Return the gradient of the logits, in FP32 and rounded once, in place of the saved logits."""
    rows = saved_input.view(-1, saved_input.shape[-1])
    factor = grad_output.reshape(-1, 1).float()
    if n_non_ignore is not None:
        factor = factor / n_non_ignore
    grad = gradient_without_target(rows, stats, label_smoothing, world_size)
    grad[targets_here(target.view(-1), rows.shape[1], rank)] -= 1 - label_smoothing
    ignored = target.view(-1, 1) == ignore_idx
    rows.copy_(grad.mul_(factor).masked_fill_(ignored, 0.0))
    return saved_input


def rank_and_size(group: Any) -> tuple[int, int]:
    """This rank and the number of ranks; a single device without a process group."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def counted_rows(tokens: Tensor, ignore_idx: int) -> Tensor:
    """Return how many rows are not ignored, at least 1: int64 ``[1]``."""
    return (tokens != ignore_idx).sum().clamp_(min=1).view(1)


def statistics(rows: Tensor, tokens: Tensor, rank: int, ranks: int, group: Any) -> Statistics:
    """``Statistics`` of rows ``[rows, vocabulary]`` of which each rank has a part, in the order of the ranks."""
    logits = rows.float()
    largest = logits.amax(1)
    column = (tokens - rank * logits.shape[1])[:, None]
    is_here = (column >= 0) & (column < logits.shape[1])
    of_target = logits.gather(1, column.masked_fill(~is_here, 0)).masked_fill(~is_here, -torch.inf)[:, 0]
    local = torch.stack([largest, (logits - largest[:, None]).exp_().sum(1), of_target, logits.sum(1)], 1)
    if ranks == 1:
        return Statistics(local[:, :2].contiguous(), local[:, 2], local[:, 3])
    parts = torch.empty(ranks, *local.shape)
    dist.all_gather_into_tensor(parts.view(-1, 4), local, group=group)
    largest = parts[:, :, 0].amax(0)
    denominator = (parts[:, :, 1] * (parts[:, :, 0] - largest).exp()).sum(0)
    return Statistics(torch.stack([largest, denominator], 1), parts[:, :, 2].amax(0), parts[:, :, 3].sum(0))


def row_losses(row: Statistics, vocabulary: int, label_smoothing: float) -> Tensor:
    """FP32 ``[rows]``: ``-log softmax`` of the target, smoothed over the whole vocabulary."""
    largest, log_sum = row.stats[:, 0], row.stats[:, 1].log()
    losses = -(row.of_target - largest - log_sum)
    if label_smoothing > 0:
        smooth = label_smoothing * (largest + log_sum) - label_smoothing / vocabulary * row.total
        losses = losses * (1 - label_smoothing) + smooth
    return losses


def gradient_without_target(rows: Tensor, stats: Tensor, label_smoothing: float, ranks: int) -> Tensor:
    """FP32 in the shape of ``rows``: softmax, less what label smoothing expects of each token."""
    return (rows.float() - stats[:, :1]).exp_().div_(stats[:, 1:]).sub_(label_smoothing / (rows.shape[1] * ranks))


def targets_here(tokens: Tensor, columns: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the rows whose target is in this rank's part of the vocabulary, and its column there."""
    column = tokens - rank * columns
    (rows,) = ((column >= 0) & (column < columns)).nonzero(as_tuple=True)
    return rows, column[rows]
