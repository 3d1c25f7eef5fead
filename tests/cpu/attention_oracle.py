"""Differentiable attention in FP64 from its formula, and bounds of the errors of half-precision and FP8 kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

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
    """Return ``softmax(q k^T / sqrt(features) + bias) v``, with 0 for queries that see nothing.

    Args:
        query: ``[batch, seq, heads, features]`` FP64.
        key: like ``query``, with GQA groups in the place of heads. So is ``value``.
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
    """Return ``[batch or 1, 1, queries, keys]``: query i sees keys ``i + offset - left`` to ``i + offset + right``.

    Args:
        offset: one number, or one for each entry of the batch.
    """
    offsets = torch.as_tensor(offset).reshape(-1, 1, 1, 1)
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - offsets
    return (distance >= -math.inf if left is None else distance >= -left) & (
        distance <= math.inf if right is None else distance <= right
    )


def tokens(lengths: Iterable[int], size: int) -> Tensor:
    """Return ``[batch, size]``, True for a token and False for padding."""
    return torch.arange(size) < torch.tensor(list(lengths))[:, None]


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over the norm of ``exact``, in units of the actual dtype's eps."""
    error = (actual.double() - exact).norm() / exact.norm()
    return error.item() / torch.finfo(actual.dtype).eps


HALF_PLACE = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
HALF_SUBNORMAL = {torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17}


@dataclass(frozen=True)
class Exact:
    """FP64 values and, for each element, a bound of the error that casting the intermediate tensor may cause.

    Attributes:
        values: by name, each ``[batch, heads, seq, features]``.
        bounds: of the errors, in the values' shapes.
        amax: of the tensor that is cast.
    """

    values: dict[str, Tensor]
    bounds: dict[str, Tensor]
    amax: Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, s_scale: float) -> Exact:
    """Return O.

    Args:
        q: ``[batch, heads, queries, features]``; k and v as ``[batch, groups, keys, features]``.
        visible: ``[batch or 1, 1, queries, keys]``.
        s_scale: multiplies P before its cast to E4M3; small enough that nothing saturates.
    """
    p = probabilities(q, k, visible, scale)
    values = _for_heads(v, q)
    return Exact({"o": p @ values}, {"o": _half_place(p, s_scale, torch.float8_e4m3fn) @ values.abs()}, p.amax())


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    visible: Tensor,
    scale: float,
    s_scale: float,
    dp_scale: float,
) -> Exact:
    """Return dQ, dK and dV. ``o`` is the output that the kernel reads, and ``do`` has been cast to E5M2."""
    q, k, v, o, do = (tensor.double() for tensor in (q, k, v, o, do))
    p = probabilities(q, k, visible, scale)
    dp = do @ _for_heads(v, q).mT
    ds = p * (dp - (do * o).sum(-1, keepdim=True)) * scale
    p_error = _half_place(p, s_scale, torch.float8_e4m3fn)
    ds_error = _half_place(ds, dp_scale, torch.float8_e5m2)
    groups = k.shape[1]
    return Exact(
        {"dq": ds @ _for_heads(k, q), "dk": _of_groups(ds.mT @ q, groups), "dv": _of_groups(p.mT @ do, groups)},
        {
            "dq": ds_error @ _for_heads(k, q).abs(),
            "dk": _of_groups(ds_error.mT @ q.abs(), groups),
            "dv": _of_groups(p_error.mT @ do.abs(), groups),
        },
        ds.abs().amax(),
    )


def probabilities(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Return ``[batch, heads, queries, keys]`` in FP64; rows of queries that see nothing are 0."""
    scores = q.double() @ _for_heads(k, q).mT * scale
    return scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(nan=0.0)


def _half_place(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    relative = values.abs() * HALF_PLACE[dtype]
    return torch.where(values == 0, 0.0, relative.clamp(min=HALF_SUBNORMAL[dtype] / scale))


def _for_heads(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.double().repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _of_groups(tensor: Tensor, groups: int) -> Tensor:
    return tensor.unflatten(1, (groups, -1)).sum(2)
