"""Attention scores as a GEMM in FP16 or BF16 computes them, by where the scale is applied and what is rounded.

``softmax(scale Q K^T)`` is the same wherever the scale is applied, until numbers are rounded and overflow. Two choices
matter: the placement of the scale, and what the product is kept in before the scale reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Products that a tensor core adds before its sum is rounded to FP16: the depth of ``mma.m16n8k16`` (PTX ISA).
PRODUCTS_AT_ONCE = 16


@dataclass(frozen=True)
class Scaled:
    """Operands of the product, what is multiplied with it, and what softmax multiplies the scores with.

    Attributes:
        query: ``[heads, queries, head_dim]``.
        key: ``[heads, keys, head_dim]``.
        alpha: factor of the product.
        in_softmax: factor that softmax applies in FP32.
    """

    query: Tensor
    key: Tensor
    alpha: float
    in_softmax: float = 1.0


def _after(query: Tensor, key: Tensor, scale: float, layer: int) -> Scaled:
    return Scaled(query, key, scale)


def _query(query: Tensor, key: Tensor, scale: float, layer: int) -> Scaled:
    return Scaled(query * scale, key, 1.0)


def _both(query: Tensor, key: Tensor, scale: float, layer: int) -> Scaled:
    root = math.sqrt(scale)
    return Scaled(query * root, key * root, 1.0)


def _layer(query: Tensor, key: Tensor, scale: float, layer: int) -> Scaled:
    return Scaled(query, key, scale / layer, float(layer))


# Where the scale is applied: to the product; to the queries; its square root to both (Megatron-DeepSpeed, pull request
# 118); to the product, divided by the layer's number, which softmax multiplies back (Megatron-LM,
# ``apply_query_key_layer_scaling``).
PLACEMENTS: dict[str, Callable[[Tensor, Tensor, float, int], Scaled]] = {
    "after": _after,
    "query": _query,
    "both": _both,
    "layer": _layer,
}


def _fp32_product(scaled: Scaled) -> Tensor:
    """Sums and alpha in FP32, one rounding: cuBLAS with ``CUBLAS_COMPUTE_32F``, PyTorch's default."""
    product = scaled.query.float() @ scaled.key.float().mT
    return (product * scaled.alpha).to(scaled.query.dtype)


def _stored_product(scaled: Scaled) -> Tensor:
    """Sums in FP32, stored, then scaled by another kernel: ``q @ k.T / sqrt(d)``."""
    product = (scaled.query.float() @ scaled.key.float().mT).to(scaled.query.dtype)
    return product * scaled.alpha


def _half_product(scaled: Scaled) -> Tensor:
    """Sums and alpha in the dtype: cuBLAS with ``CUBLAS_COMPUTE_16F``, which FP16 alone has."""
    dtype = scaled.query.dtype
    chunks = zip(
        scaled.query.float().split(PRODUCTS_AT_ONCE, -1), scaled.key.float().split(PRODUCTS_AT_ONCE, -1), strict=True
    )
    total = torch.zeros((), dtype=dtype, device=scaled.query.device)
    for query, key in chunks:
        total = (total.float() + query @ key.mT).to(dtype)
    return total * scaled.alpha


# What the product is kept in before the scale reaches it.
KEPT: dict[str, Callable[[Scaled], Tensor]] = {
    "fp32": _fp32_product,
    "stored": _stored_product,
    "half": _half_product,
}


def scores(query: Tensor, key: Tensor, placement: str, kept: str, layer: int) -> Tensor:
    """Scaled scores as softmax sees them.

    Args:
        query: ``[heads, queries, head_dim]``, FP16 or BF16.
        key: ``[heads, keys, head_dim]``, ditto.
        placement: of ``PLACEMENTS``.
        kept: of ``KEPT``.
        layer: the layer's number, from 1.

    Returns:
        ``[heads, queries, keys]`` FP32; each is a number of the inputs' dtype, times ``layer`` with that placement.
    """
    scaled = PLACEMENTS[placement](query, key, 1 / math.sqrt(query.shape[-1]), layer)
    return KEPT[kept](scaled).float() * scaled.in_softmax


def overflows(scores: Tensor) -> bool:
    """Whether softmax gives NaN: a score is plus infinity or NaN. Minus infinity is a probability of 0."""
    return bool((scores.isnan() | (scores == math.inf)).any())


def attend(scores: Tensor, value: Tensor) -> Tensor:
    """``softmax(scores) value`` with softmax in FP32, as TE and Megatron-LM compute it; rounded to value's dtype."""
    probabilities = scores.softmax(-1).to(value.dtype)
    return (probabilities.float() @ value.float()).to(value.dtype)
