"""LayerNorm and RMSNorm, forward and backward, over the last dimension.

Follows TransformerEngine 2.20.2: ``csrc/extensions/normalization.cpp`` and the kernels of
``common/normalization/{layernorm,rmsnorm}``. Statistics, products and sums are FP32; each result is rounded once.

In the formulas below ``n`` is the size of the last dimension, ``g`` is gamma (plus 1 if it is zero-centered),
and sums run over a row unless said otherwise::

    LayerNorm  y = (x - mu) rsigma    mu = sum(x) / n    rsigma = 1 / sqrt(sum((x - mu)^2) / n + eps)
    RMSNorm    y = x rsigma                              rsigma = 1 / sqrt(sum(x^2) / n + eps)
    both       z = g y + beta         dgamma = sum over rows of dz y       dbeta = sum over rows of dz
               dx = rsigma (dy - y sum(dy y) / n [- sum(dy) / n])          dy = g dz; the last term is LayerNorm's
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_on_cpu.cast import store
from te_on_cpu.enums import TORCH_DTYPE

__all__ = ["layernorm_bwd", "layernorm_fwd", "rmsnorm_bwd", "rmsnorm_bwd_add", "rmsnorm_fwd"]


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: int | torch.dtype,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Apply LayerNorm, rounded to ``otype`` or quantized.

    Args:
        input: ``[..., n]``, FP32, FP16 or BF16.
        weight: gamma, ``[n]``; gamma - 1 if ``zero_centered_gamma``.
        bias: beta, ``[n]``, or None.
        ln_out: receives the result; None for a new tensor.
        quantizer: TE's, or None.
        otype: the result's dtype (its nominal dtype if it is quantized), a ``DType`` or a ``torch.dtype``.
        sm_margin: ignored on a CPU.

    Returns:
        ``[z, mu, rsigma]``: z like ``input``; mu and rsigma FP32, one for each row, ``[rows]``.
    """
    x = _rows(input)
    mu = x.mean(-1, keepdim=True)
    z = x - mu
    rsigma = _reciprocal_root_mean_square(z, eps)
    z.mul_(rsigma).mul_(_gamma(weight, zero_centered_gamma))
    if bias is not None:
        z.add_(bias)
    stored = store(z.view(input.shape), quantizer, _dtype(otype), ln_out, kernel="layernorm_fwd")
    return [stored, mu.flatten(), rsigma.flatten()]


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: int | torch.dtype,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Apply RMSNorm, rounded to ``otype`` or quantized; arguments are those of ``layernorm_fwd``.

    Returns:
        ``[z, None, rsigma]``: z like ``input``; rsigma FP32, ``[rows]``.
    """
    x = _rows(input)
    rsigma = _reciprocal_root_mean_square(x, eps)
    z = (x * rsigma).mul_(_gamma(weight, zero_centered_gamma))
    stored = store(z.view(input.shape), quantizer, _dtype(otype), ln_out, kernel="rmsnorm_fwd")
    return [stored, None, rsigma.flatten()]


def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Return the gradients of LayerNorm.

    Args:
        dz: gradient of the result, in the shape of ``x``.
        x: the forward's input, ``[..., n]``.
        mu, rsigma: the forward's statistics, FP32, ``[rows]``.
        gamma: the forward's weight, ``[n]``.

    Returns:
        ``[dx, dgamma, dbeta]``: dx in the shape and dtype of ``x``, the others in those of ``gamma``.
    """
    y = (_rows(x) - mu.view(-1, 1)).mul_(rsigma.view(-1, 1))
    dy = _rows(dz) * _gamma(gamma, zero_centered_gamma)
    dgamma, dy_y = _weight_gradient_and_projection(dz, y, dy)
    dx = dy.sub_(y.mul_(dy_y).add_(dy.mean(-1, keepdim=True))).mul_(rsigma.view(-1, 1))
    dbeta = _rows(dz).sum(0)
    return [dx.view(x.shape).to(x.dtype), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)]


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Return the gradients ``[dx, dgamma]`` of RMSNorm; arguments are those of ``layernorm_bwd``."""
    dx, dgamma = _rmsnorm_gradients(dz, x, rsigma, gamma, zero_centered_gamma)
    return [dx.to(x.dtype), dgamma.to(gamma.dtype)]


def rmsnorm_bwd_add(
    dz: Tensor, x: Tensor, add: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Return ``[dx + add, dgamma]`` of RMSNorm; ``add``, in the shape of ``x``, is added before rounding."""
    dx, dgamma = _rmsnorm_gradients(dz, x, rsigma, gamma, zero_centered_gamma)
    return [dx.add_(add).to(x.dtype), dgamma.to(gamma.dtype)]


def _rmsnorm_gradients(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    y = _rows(x) * rsigma.view(-1, 1)
    dy = _rows(dz) * _gamma(gamma, zero_centered_gamma)
    dgamma, dy_y = _weight_gradient_and_projection(dz, y, dy)
    dx = dy.sub_(y.mul_(dy_y)).mul_(rsigma.view(-1, 1))
    return dx.view(x.shape), dgamma


def _weight_gradient_and_projection(dz: Tensor, y: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``dgamma``, ``[n]``, and the mean of ``dy y`` over each row, ``[rows, 1]``."""
    product = _rows(dz) * y
    dgamma = product.sum(0)
    torch.mul(dy, y, out=product)
    return dgamma, product.mean(-1, keepdim=True)


def _rows(tensor: Tensor) -> Tensor:
    """Return ``[rows, n]`` in FP32; a view if ``tensor`` is FP32 and contiguous."""
    return tensor.reshape(-1, tensor.shape[-1]).float()


def _reciprocal_root_mean_square(x: Tensor, eps: float) -> Tensor:
    return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    """Return each column's factor, FP32 ``[n]``; TE adds the 1 in FP32, so a small gamma - 1 keeps all its bits."""
    return weight.float() + 1 if zero_centered else weight.float()


def _dtype(otype: int | torch.dtype) -> torch.dtype:
    return otype if isinstance(otype, torch.dtype) else TORCH_DTYPE[int(otype)]
