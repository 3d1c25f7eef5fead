"""Attention in FP64 from its formula, differentiable, and how near a kernel of half precision has to come to it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """``softmax(q k^T / sqrt(features) + bias) v``, 0 where nothing is visible.

    Args:
        query: ``[batch, seq, heads, features]`` FP64.
        key: with GQA groups for heads; as value.
        visible: ``[batch or 1, 1, queries, keys]``, True where a query attends to a key.
        bias: broadcasts to ``[batch, heads, queries, keys]``.
        sink: ``[heads]``; ``exp`` of it is added to the denominator.
        softcap: if not 0, scores ``s`` become ``softcap * tanh(s / softcap)`` before the bias is added.

    Returns:
        ``[batch, seq, heads, value features]``.
    """
    repeats = query.shape[2] // key.shape[2]
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = (scores if bias is None else scores + bias).masked_fill(~visible, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    top = scores.detach().amax(-1, keepdim=True)
    weights = torch.where(top.isfinite(), scores - top, -math.inf).exp()
    total = weights.sum(-1, keepdim=True)
    probabilities = weights / torch.where(total == 0, 1.0, total)
    return (probabilities[..., : key.shape[2]] @ value).transpose(1, 2)


def visible(
    queries: int, keys: int, left: int | None = None, right: int | None = None, offset: Tensor | int = 0
) -> Tensor:
    """``[batch or 1, 1, queries, keys]``: keys ``i + offset - left`` to ``i + offset + right`` of query i.

    Args:
        offset: one number, or one for each entry of the batch.
    """
    offsets = torch.as_tensor(offset).reshape(-1, 1, 1, 1)
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - offsets
    return (distance >= -math.inf if left is None else distance >= -left) & (
        distance <= math.inf if right is None else distance <= right
    )


def tokens(lengths: Iterable[int], size: int) -> Tensor:
    """``[batch, size]``, True for a token and False for padding."""
    return torch.arange(size) < torch.tensor(list(lengths))[:, None]


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """The norm of the difference over the norm of the exact one, in units of the actual dtype's eps."""
    error = (actual.double() - exact).norm() / exact.norm()
    return error.item() / torch.finfo(actual.dtype).eps
