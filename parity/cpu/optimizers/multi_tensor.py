"""Scaling, norms and FP8 scales of lists of tensors in one call.

Follows ``csrc/extensions/multi_tensor`` of TransformerEngine 2.20.2, and ``common/multi_tensor``, in FP32 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parity.cpu.quantized import float8

__all__ = [
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_unscale_l2norm",
]

_Lists = Sequence[Sequence[Tensor]]


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, is_infinite: Tensor, tensor_lists: _Lists, scale: float | Tensor) -> None:
    """Write each tensor of the first list, times ``scale``, to that of the second.

    Args:
        is_infinite: set to 1 if an input is infinite or NaN; else left as it is.
    """
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source.float() * scale)
        if not source.isfinite().all():
            is_infinite.fill_(1)


multi_tensor_scale_tensor = multi_tensor_scale


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: _Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The Euclidean norm of all tensors together, FP32 ``[1]``, and of each, FP32 ``[tensors]``, or empty.

    Args:
        noop_flag: set to 1 if a sum of squares is infinite or NaN; else left as it is.
        per_tensor: whether each tensor's own norm is asked for.
    """
    return _l2norm(noop_flag, tensor_lists, None, per_tensor)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: _Lists, inv_scale: Tensor, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """As ``multi_tensor_l2norm``, of the tensors times ``inv_scale`` (FP32, one element)."""
    return _l2norm(noop_flag, tensor_lists, inv_scale, per_tensor)


def _l2norm(
    noop_flag: Tensor, tensor_lists: _Lists, inv_scale: Tensor | None, per_tensor: bool | None
) -> tuple[Tensor, Tensor]:
    values = (tensor.float() if inv_scale is None else tensor.float() * inv_scale for tensor in tensor_lists[0])
    squares = torch.stack([value.square().sum() for value in values])
    if not squares.isfinite().all():
        noop_flag.fill_(1)
    return squares.sum().sqrt().view(1), squares.sqrt() if per_tensor else torch.empty(0)


@torch.no_grad()
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Fill FP8 scales and their reciprocals from amaxes.

    Args:
        tensor_lists: amaxes, scales and inverse scales, FP32.
        max_fp8: what an amax is scaled to.
        force_pow_2_scales: round scales down to powers of two.
        epsilon: smaller amaxes count as this.
    """
    for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
        scale.copy_(float8.scale_from_amax(amax, max_fp8, epsilon, force_pow_2_scales))
        scale_inv.copy_(scale.reciprocal())
