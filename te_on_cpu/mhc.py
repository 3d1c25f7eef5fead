"""Counterparts of TransformerEngine's Triton kernels of manifold hyper-connections.

Follows ``common/triton/mhc.py`` (2.15 to 2.20.2). TE's own wrappers (``pytorch/triton/mhc.py``) launch these with the
kernels' arguments by name: contiguous tensors, including those that receive results, and strides and block sizes, which
do not matter here. There are ``M`` rows, one per token; each has ``n`` = 4 streams of ``C`` channels.

Between loading and storing, everything is FP32, as are all sums. Where the kernels use ``tl.fma``, the product is not
rounded, and streams are added in the kernels' order: 0, 2, 1, 3, because ``tl.split`` takes every other element.

Compared with an H100 (TE 2.20.2, Triton 3.6), results are bit-identical unless they contain a sum of unspecified order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from te_on_cpu import kernel_choices, tensor_cores

_STREAMS = (0, 2, 1, 3)
# The number of rows in a block, whose sum is one row of a workspace (``scale_config``, ``expand_combine_prune_bwd``).
_ROWS_OF_SCALE, _ROWS_OF_BIAS = 128, 4


def _dot(left: Tensor, right: Tensor, precision: str) -> Tensor:
    """Return ``left @ right`` as ``tl.dot`` computes it with this ``input_precision``, which only affects FP32.

    Triton passes FP32 unchanged to the tensor cores, which truncate it to TF32, while cuBLAS rounds. Both were observed
    on an H100.
    """
    if left.dtype == right.dtype == torch.float32 and kernel_choices.FP32_EXACT not in kernel_choices.current():
        if precision == "tf32":
            left, right = tensor_cores.truncate_to_tf32(left), tensor_cores.truncate_to_tf32(right)
        elif precision == "tf32x3":
            return _dot_of_halves(left, right)
    return left.float() @ right.float()


def _dot_of_halves(left: Tensor, right: Tensor) -> Tensor:
    """Multiply FP32 as three TF32 products, without the product of the two remainders."""
    (a, a_rest), (b, b_rest) = _halves(left), _halves(right)
    return (a_rest @ b + a @ b_rest).nan_to_num_(nan=0.0) + a @ b


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    large = tensor_cores.round_to_tf32(values)
    return large, tensor_cores.round_to_tf32(values - large)


def _fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return ``x * y + z`` in FP32, rounded once, because FP64 holds products of FP32 values exactly."""
    return (x.double() * y.double()).add_(z.double()).float()


def _weighted(values: Tensor, weights: Tensor, total: Tensor) -> Tensor:
    """Return ``total`` plus the streams in the last dimension of ``values``, each times its weight."""
    for stream in _STREAMS:
        total = _fma(values[..., stream], weights[..., stream], total)
    return total


def _add_sums(values: Tensor, total: Tensor, workspace: Tensor | None, rows: int) -> None:
    """Add the sum over the rows of ``values`` to ``total``, or write the sum of each block of rows to a workspace."""
    if workspace is None:
        total += values.sum(0)
        return
    blocks = pad(values, (0, 0, 0, -len(values) % rows)).view(-1, rows, values.shape[1])
    workspace[:, : values.shape[1]] = blocks.sum(1)


# Projection: ``H = x phi^T`` and the mean square of each row of x.


def projection_forward(
    *, x_ptr: Tensor, phi_ptr: Tensor, h_ptr: Tensor, ms_ptr: Tensor, precision: str, **_: Any
) -> None:
    """Write H to the first columns of ``[M, 32]`` and the mean squares to ``[M]``, both FP32 and initially zero."""
    h_ptr[:, : len(phi_ptr)] = _dot(x_ptr.to(phi_ptr.dtype), phi_ptr.t(), precision)
    ms_ptr.copy_(x_ptr.float().square().sum(1) / x_ptr.shape[1])


def projection_backward_x(
    *,
    x_ptr: Tensor,
    grad_x_ptr: Tensor,
    phi_ptr: Tensor,
    grad_h_ptr: Tensor,
    grad_ms_ptr: Tensor,
    precision: str,
    norm_weight_ptr: Tensor | None = None,
    FUSE_GRAD_X_ACC: bool = False,
    **_: Any,
) -> None:
    """Write the gradient of x, or add it to an FP32 gradient."""
    phi = phi_ptr
    if norm_weight_ptr is not None:
        phi = phi.float() * norm_weight_ptr.to(phi.dtype).float()
    factor = grad_ms_ptr.float() * 2 / x_ptr.shape[1]
    product = _dot(grad_h_ptr[:, : len(phi)].to(phi.dtype), phi, precision)
    grad = x_ptr.float() * factor[:, None] + product
    if FUSE_GRAD_X_ACC:
        grad_x_ptr += grad
    else:
        grad_x_ptr.copy_(grad)


def projection_backward_phi(
    *,
    x_ptr: Tensor,
    grad_H_ptr: Tensor,
    phi_ptr: Tensor,
    norm_weight_ptr: Tensor,
    grad_phi_ptr: Tensor,
    grad_norm_weight_ptr: Tensor,
    precision: str,
    **_: Any,
) -> None:
    """Write the gradients of phi and of the norm's weight that multiplies it."""
    grad = _dot(grad_H_ptr[:, : len(phi_ptr)].t(), x_ptr.to(grad_H_ptr.dtype), precision)
    grad_phi_ptr.copy_(grad * norm_weight_ptr.float())
    grad_norm_weight_ptr.copy_((grad * phi_ptr.float()).sum(0))


# Scale: ``H alpha / rms + beta``, with a sigmoid for the two connections that are not residual.


def _per_column(alpha: Tensor, n: int) -> Tensor:
    """Repeat each of the three factors for the columns of H that it scales."""
    return alpha.repeat_interleave(torch.tensor([n, n, n * n]))


def scale_forward(
    *,
    h_ptr: Tensor,
    a_ptr: Tensor,
    b_ptr: Tensor,
    ms_ptr: Tensor,
    out_ptr: Tensor,
    n: int,
    eps: float,
    **_: Any,
) -> None:
    """Write the scaled H to the first columns of ``[M, 32]``, and zeros to the others."""
    alpha = _per_column(a_ptr, n)
    inverse = 1.0 / (ms_ptr + eps).sqrt()
    out = _fma(alpha * h_ptr[:, : len(alpha)], inverse[:, None], b_ptr.view(-1))
    out[:, : 2 * n].sigmoid_()
    out[:, n : 2 * n] *= 2
    out_ptr.copy_(pad(out, (0, out_ptr.shape[1] - len(alpha))))


def scale_backward(
    *,
    grad_out_ptr: Tensor,
    out_ptr: Tensor,
    grad_h_ptr: Tensor,
    h_ptr: Tensor,
    grad_a_ptr: Tensor,
    a_ptr: Tensor,
    grad_b_ptr: Tensor,
    grad_ms_ptr: Tensor,
    ms_ptr: Tensor,
    n: int,
    eps: float,
    ws_grad_a_ptr: Tensor | None = None,
    ws_grad_b_ptr: Tensor | None = None,
    **_: Any,
) -> None:
    """Write the gradients of H and of the mean squares; add those of alpha and beta, or write the sums of blocks."""
    alpha = _per_column(a_ptr, n)
    columns = len(alpha)
    rms = (ms_ptr + eps).sqrt()[:, None]
    grad, out, h = (tensor[:, :columns] for tensor in (grad_out_ptr, out_ptr, h_ptr))
    pre, post = slice(0, n), slice(n, 2 * n)
    grad_h = grad.clone()
    grad_h[:, pre] = grad[:, pre] * out[:, pre] * (1 - out[:, pre])
    grad_h[:, post] = grad[:, post] * out[:, post] * 0.5 * (2 - out[:, post])
    by_column = h * grad_h / rms
    by_factor = torch.stack([part.sum(1) for part in by_column.split([n, n, n * n], 1)], 1)
    _add_sums(by_factor, grad_a_ptr, ws_grad_a_ptr, _ROWS_OF_SCALE)
    _add_sums(grad_h, grad_b_ptr[..., :columns].view(-1), ws_grad_b_ptr, _ROWS_OF_SCALE)
    grad_ms_ptr.copy_((-grad_h * h * alpha).sum(1) / rms[:, 0].square() / (2 * rms[:, 0]))
    grad_h_ptr[:, :columns] = alpha * grad_h / rms


# Sinkhorn: the rows and columns of ``exp(x)`` are divided by their sums in turn, in log space.


def _log_sum(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    largest = x.amax(dim, keepdim=True)
    return (x - largest).exp().sum(dim).log(), largest.squeeze(dim)


def _steps(x: Tensor, iters: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the terms f and g of each iteration, which are added to the rows and columns of x; zeros come first."""
    f, g = [x.new_zeros(x.shape[:2])], [x.new_zeros(x.shape[:2])]
    for _ in range(iters):
        log_sum, largest = _log_sum(x + g[-1][:, None, :], 2)
        f.append(-log_sum - largest)
        log_sum, largest = _log_sum(x + f[-1][:, :, None], 1)
        g.append(-log_sum - largest)
    return f, g


def sinkhorn_forward(
    *,
    x_ptr: Tensor,
    output_ptr: Tensor,
    n: int,
    iters: int,
    hist_f_ptr: Tensor | None = None,
    hist_g_ptr: Tensor | None = None,
    **_: Any,
) -> None:
    """Write the matrices, FP32 ``[M, n * n]``, and the terms of each iteration if there are buffers for them."""
    x = x_ptr.view(-1, n, n)
    f, g = _steps(x, iters)
    output_ptr.copy_((f[-1][:, :, None] + x + g[-1][:, None, :]).exp().view(output_ptr.shape))
    for history, steps in ((hist_f_ptr, f), (hist_g_ptr, g)):
        if history is not None:
            history.copy_(torch.stack(steps).view(history.shape))


def _sinkhorn_gradient(x: Tensor, output: Tensor, grad_out: Tensor, f: list[Tensor], g: list[Tensor]) -> Tensor:
    grad_log = grad_out * output
    grad = grad_log
    grad_g = grad_log.sum(1)
    for step in range(len(f) - 1, 0, -1):
        to_g = -grad_g[:, None, :] * (f[step][:, :, None] + x + g[step][:, None, :]).exp()
        grad_f = (to_g + grad_log).sum(2)
        grad_log = torch.zeros_like(grad_log)  # only the last iteration's f and g both reach the output directly
        to_f = -grad_f[:, :, None] * (f[step][:, :, None] + x + g[step - 1][:, None, :]).exp()
        grad_g = to_f.sum(1)
        grad = grad + (to_f + to_g)
    return grad


def sinkhorn_backward(
    *,
    grad_out_ptr: Tensor,
    output_ptr: Tensor,
    grad_x_ptr: Tensor,
    x_ptr: Tensor,
    hist_f_ptr: Tensor,
    hist_g_ptr: Tensor,
    n: int,
    **_: Any,
) -> None:
    """Write the gradient of x from the terms of the forward pass's iterations."""
    x, output, grad_out = (tensor.view(-1, n, n) for tensor in (x_ptr, output_ptr, grad_out_ptr.float()))
    f, g = (list(history.view(len(history), -1, n)) for history in (hist_f_ptr, hist_g_ptr))
    grad_x_ptr.copy_(_sinkhorn_gradient(x, output, grad_out, f, g).view(grad_x_ptr.shape))


def sinkhorn_backward_recomputed(
    *, x_ptr: Tensor, hist_f_ptr: Tensor, hist_g_ptr: Tensor, n: int, iters: int, **others: Any
) -> None:
    """Recompute the terms of each iteration, then apply ``sinkhorn_backward``."""
    for history, steps in zip((hist_f_ptr, hist_g_ptr), _steps(x_ptr.view(-1, n, n), iters), strict=True):
        history.copy_(torch.stack(steps).view(history.shape))
    sinkhorn_backward(x_ptr=x_ptr, hist_f_ptr=hist_f_ptr, hist_g_ptr=hist_g_ptr, n=n, **others)


# Aggregate: the streams of x are summed into one, weighted by H_pre.


def aggregate_forward(
    *, x_ptr: Tensor, H_pre_ptr: Tensor, output_ptr: Tensor, M: int, C: int, n: int, **_: Any
) -> None:
    """Write the weighted sum of the streams, ``[M, C]``."""
    total = _weighted(x_ptr.view(M, C, n), H_pre_ptr.view(M, 1, n), torch.zeros(M, C))
    output_ptr.copy_(total.view(output_ptr.shape))


def aggregate_backward(
    *,
    grad_output_ptr: Tensor,
    H_pre_ptr: Tensor,
    grad_H_pre_ptr: Tensor,
    x_ptr: Tensor,
    grad_x_ptr: Tensor,
    M: int,
    C: int,
    n: int,
    precision: str,
    FUSE_GRAD_X_ACC: bool = False,
    **_: Any,
) -> None:
    """Write the gradient of H_pre, rounded to its dtype, and write that of x or add it to an FP32 gradient."""
    grad = grad_output_ptr.view(M, 1, C)
    grad_weights = _dot(grad, x_ptr.view(M, C, n), precision)
    grad_H_pre_ptr.copy_(grad_weights.to(H_pre_ptr.dtype).view(grad_H_pre_ptr.shape))
    factors = grad.transpose(1, 2), H_pre_ptr.view(M, 1, n)
    if FUSE_GRAD_X_ACC and torch.promote_types(grad.dtype, H_pre_ptr.dtype) == torch.float32:
        grad_x_ptr.copy_(_fma(*factors, grad_x_ptr.view(M, C, n)).view(grad_x_ptr.shape))
        return
    grad_x = (factors[0] * factors[1]).view(grad_x_ptr.shape)
    grad_x_ptr.copy_(grad_x_ptr + grad_x if FUSE_GRAD_X_ACC else grad_x)


# Expand and combine: a layer's output is added to all streams, weighted by H_post, and H_res mixes the old streams.


def expand_combine_forward(
    *,
    f_ptr: Tensor,
    H_post_ptr: Tensor,
    x_ptr: Tensor,
    H_res_ptr: Tensor,
    output_ptr: Tensor,
    M: int,
    C: int,
    n: int,
    bias_ptr: Tensor | None = None,
    **_: Any,
) -> None:
    """Write ``(f + bias) H_post + x H_res``, ``[M, C, n]``."""
    weights, mixing = H_post_ptr.view(M, 1, n), H_res_ptr.view(M, 1, n, n)
    total = torch.zeros(M, C, n)
    for values in (None if bias_ptr is None else bias_ptr.view(1, C, 1), f_ptr.view(M, C, 1)):
        if values is not None:
            total = _fma(values, weights, total)
    total = _weighted(x_ptr.view(M, C, 1, n), mixing.transpose(2, 3), total)
    output_ptr.copy_(total.view(output_ptr.shape))


def expand_combine_backward(
    *,
    grad_output_ptr: Tensor,
    f_ptr: Tensor,
    H_post_ptr: Tensor,
    x_ptr: Tensor,
    H_res_ptr: Tensor,
    grad_H_post_ptr: Tensor,
    grad_f_ptr: Tensor,
    grad_H_res_ptr: Tensor,
    grad_x_ptr: Tensor,
    M: int,
    C: int,
    n: int,
    precision: str,
    bias_ptr: Tensor | None = None,
    grad_bias_ptr: Tensor | None = None,
    grad_bias_ws_ptr: Tensor | None = None,
    **_: Any,
) -> None:
    """Write the gradients; the bias gradient is the sum over rows of f's gradient before it is rounded."""
    grad, f, x = grad_output_ptr.view(M, C, n), f_ptr.view(M, 1, C), x_ptr.view(M, C, n)
    grad_weights = _dot(f, grad, precision)
    if bias_ptr is not None:
        grad_weights += _dot(bias_ptr.expand(M, 1, C), grad, precision)
    grad_H_post_ptr.copy_(grad_weights.to(H_post_ptr.dtype).view(grad_H_post_ptr.shape))
    grad_mixing = _dot(x.transpose(1, 2), grad, precision)
    grad_H_res_ptr.copy_(grad_mixing.to(H_res_ptr.dtype).view(grad_H_res_ptr.shape))
    grad_f = _weighted(grad, H_post_ptr.view(M, 1, n), torch.zeros(M, C))
    grad_f_ptr.copy_(grad_f.view(grad_f_ptr.shape))
    if bias_ptr is not None and grad_bias_ptr is not None:
        _add_sums(grad_f, grad_bias_ptr, grad_bias_ws_ptr, _ROWS_OF_BIAS)
    grad_x = _weighted(grad.view(M, C, 1, n), H_res_ptr.view(M, 1, n, n), torch.zeros(M, C, n))
    grad_x_ptr.copy_(grad_x.view(grad_x_ptr.shape))


# Up to 2.18, there are separate kernels for a bias, and a single backward kernel for the projection.
KERNELS: Mapping[str, Callable[..., None]] = {
    "_mhc_aggregate_bwd": aggregate_backward,
    "_mhc_aggregate_fwd": aggregate_forward,
    "_mhc_expand_combine_bwd": expand_combine_backward,
    "_mhc_expand_combine_fwd": expand_combine_forward,
    "_mhc_expand_combine_with_bias_bwd": expand_combine_backward,
    "_mhc_expand_combine_with_bias_fwd": expand_combine_forward,
    "_mhc_projection_bwd_fused": projection_backward_x,
    "_mhc_projection_bwd_fused_dphi": projection_backward_phi,
    "_mhc_projection_bwd_fused_dx": projection_backward_x,
    "_mhc_projection_fwd_fused": projection_forward,
    "_mhc_scale_bwd_fused": scale_backward,
    "_mhc_scale_fwd_fused": scale_forward,
    "_mhc_sinkhorn_bwd_fused": sinkhorn_backward,
    "_mhc_sinkhorn_bwd_fused_recompute": sinkhorn_backward_recomputed,
    "_mhc_sinkhorn_fwd_fused": sinkhorn_forward,
    "_mhc_sinkhorn_fwd_fused_recompute": sinkhorn_forward,
}
