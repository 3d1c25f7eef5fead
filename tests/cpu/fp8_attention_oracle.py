"""FP8 attention in FP64 from the values that its operands' codes stand for, and how far a faithful kernel may be off.

P is cast to E4M3 and dS to E5M2, each element by at most half of its last place: a relative 2^-4 and 2^-3, or half of
the smallest subnormal. What follows for each element of the results is a sum of such errors, each times the magnitude
of what it is multiplied by. Sums in FP32 and rounding the results are left to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HALF_PLACE = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
HALF_SUBNORMAL = {torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17}


@dataclass(frozen=True)
class Exact:
    """FP64 values and, element by element, how far off casts of the intermediate tensor may bring them.

    Attributes:
        values: by name; ``[batch, heads, seq, features]``.
        bounds: of the errors, shaped as the values.
        amax: of the tensor that is cast.
    """

    values: dict[str, Tensor]
    bounds: dict[str, Tensor]
    amax: Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, s_scale: float) -> Exact:
    """O.

    Args:
        q: ``[batch, heads, queries, features]``; k and v as ``[batch, groups, keys, features]``.
        visible: ``[batch or 1, 1, queries, keys]``.
        s_scale: what P is multiplied by before its cast to E4M3; small enough that nothing saturates.
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
    """dQ, dK and dV; ``o`` is what the kernel reads, and dO is cast to E5M2 before it comes in."""
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
    """``[batch, heads, queries, keys]`` FP64; rows of queries that see nothing are 0."""
    scores = q.double() @ _for_heads(k, q).mT * scale
    return scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(nan=0.0)


def _half_place(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    relative = values.abs() * HALF_PLACE[dtype]
    return torch.where(values == 0, 0.0, relative.clamp(min=HALF_SUBNORMAL[dtype] / scale))


def _for_heads(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.double().repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _of_groups(tensor: Tensor, groups: int) -> Tensor:
    return tensor.unflatten(1, (groups, -1)).sum(2)
