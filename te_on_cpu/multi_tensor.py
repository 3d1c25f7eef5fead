"""Optimizer steps, scaling, norms and FP8 scales for lists of tensors in one call.

Follows ``csrc/extensions/multi_tensor`` of TransformerEngine 2.20.2, and ``common/multi_tensor``, in FP32 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from te_on_cpu import float8
from te_on_cpu.enums import TORCH_DTYPE

__all__ = [
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]

_Lists = Sequence[Sequence[Tensor]]


def multi_tensor_scale(chunk_size: int, is_infinite: Tensor, tensor_lists: _Lists, scale: float | Tensor) -> None:
    """Write each tensor of the first list, times ``scale``, to its counterpart in the second list.

    Args:
        is_infinite: set to 1 if an input is infinite or NaN, otherwise unchanged.
    """
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source.float() * scale)
        if not source.isfinite().all():
            is_infinite.fill_(1)


multi_tensor_scale_tensor = multi_tensor_scale


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: _Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return the Euclidean norm of all tensors together, FP32 ``[1]``, and those of each, FP32 ``[tensors]`` or empty.

    Args:
        noop_flag: set to 1 if a sum of squares is infinite or NaN, otherwise unchanged.
        per_tensor: whether to return each tensor's own norm.
    """
    return _l2norm(noop_flag, tensor_lists, None, per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: _Lists, inv_scale: Tensor, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``multi_tensor_l2norm`` of the tensors times ``inv_scale`` (FP32, one element)."""
    return _l2norm(noop_flag, tensor_lists, inv_scale, per_tensor)


def _l2norm(
    noop_flag: Tensor, tensor_lists: _Lists, inv_scale: Tensor | None, per_tensor: bool | None
) -> tuple[Tensor, Tensor]:
    values = (tensor.float() if inv_scale is None else tensor.float() * inv_scale for tensor in tensor_lists[0])
    squares = torch.stack([value.square().sum() for value in values])
    if not squares.isfinite().all():
        noop_flag.fill_(1)
    return squares.sum().sqrt().view(1), squares.sqrt() if per_tensor else torch.empty(0)


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
        max_fp8: the value that an amax is scaled to.
        force_pow_2_scales: round scales down to powers of two.
        epsilon: the least amax; smaller ones are replaced by it.
    """
    for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
        scale.copy_(float8.scale_from_amax(amax, max_fp8, epsilon, force_pow_2_scales))
        scale_inv.copy_(scale.reciprocal())


# Adam steps on lists of tensors.
#
# Follows ``csrc/extensions/multi_tensor/adam.cpp`` of TransformerEngine 2.20.2 and ``common/multi_tensor/adam.cu``. All
# arithmetic is FP32, whatever the dtypes of gradients, parameters and moments; results are rounded once.


@dataclass(frozen=True)
class Step:
    """Hold the numbers of one step of Adam, all exact in FP32.

    Attributes:
        correction1: divisor of the first moment, ``1 - beta1**step``, or 1.
        correction2: divisor of the second moment.
        decoupled: whether the decay is added to the update, as in AdamW (mode 1), or to the gradient (mode 0).
    """

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    correction1: float
    correction2: float
    decoupled: bool
    decay: float


def _step(
    lr: float, beta1: float, beta2: float, epsilon: float, step: int, mode: int, bias_correction: int, decay: float
) -> Step:
    beta1, beta2 = _fp32(beta1), _fp32(beta2)
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if bias_correction == 1 else (1.0, 1.0)
    return Step(
        _fp32(lr), beta1, beta2, _fp32(epsilon), _fp32(correction1), _fp32(correction2), mode == 1, _fp32(decay)
    )


def _fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Update parameters and moments in place.

    Args:
        noop_flag: ignored, so infinities and NaNs are applied.
        tensor_lists: gradients, parameters, first and second moments, and, optionally, FP32 master parameters. These
            are updated in place of the parameters, which receive rounded copies.
        step: counts from 1.
        mode: 0 for Adam with L2 regularization, 1 for AdamW.
        bias_correction: 1 to divide the moments by ``1 - beta**step``.
    """
    adam = _step(lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)
    for grad, param, first, second, *master in zip(*tensor_lists, strict=True):
        updated = _update(grad, master[0] if master else param, first, second, adam)
        param.copy_(updated)
        if master:
            master[0].copy_(updated)


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """Update as ``multi_tensor_adam`` does, with tensors of one element for numbers that may change.

    Args:
        noop_flag: 1 leaves everything as it is.
        inv_scale: factor of the gradients, which are overwritten.
    """
    if noop_flag.item() == 1:
        return
    for grad in tensor_lists[0]:
        grad.copy_(grad.float() * inv_scale)
    multi_tensor_adam(
        chunk_size, noop_flag, tensor_lists, float(lr), beta1, beta2, epsilon, int(step), mode, bias_correction,
        weight_decay,
    )  # fmt: skip


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


def multi_tensor_adam_param_remainder(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Update FP32 parameters that are stored as BF16 and a remainder, as ``multi_tensor_adam`` does.

    Args:
        tensor_lists: the fifth list has int16 remainders. The bits of an FP32 parameter are those of the BF16 parameter
            as the upper half, plus the remainder.
    """
    adam = _step(lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)
    for grad, param, first, second, remainder in zip(*tensor_lists, strict=True):
        bits = (param.view(torch.int16).int() << 16) + remainder.int()
        updated = _update(grad, bits.view(torch.float32), first, second, adam).view(torch.int32)
        remainder.copy_((updated << 16) >> 16)
        param.view(torch.int16).copy_((updated - remainder.int()) >> 16)


def multi_tensor_adam_fp8(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    fp8_dtype: int,
) -> None:
    """Update parameters that are FP8 codes with delayed scaling, as ``multi_tensor_adam`` does.

    Args:
        tensor_lists: gradients, uint8 codes, first and second moments, FP32 parameters, and, in FP32 with one element
            each, scales, amaxes (updated with the parameter's largest magnitude) and inverse scales.
    """
    adam = _step(lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)
    for grad, data, first, second, master, scale, amax, scale_inv in zip(*tensor_lists, strict=True):
        updated = _update(grad, master, first, second, adam)
        master.copy_(updated)
        codes = float8.encode(updated, scale, TORCH_DTYPE[int(fp8_dtype)])
        data.view(torch.uint8).copy_(codes.data)
        amax.copy_(torch.maximum(amax, float8.amax_of(updated)))
        scale_inv.copy_(codes.scale_inv.view(scale_inv.shape))


def _update(grad: Tensor, param: Tensor, first: Tensor, second: Tensor, adam: Step) -> Tensor:
    """Return the new FP32 parameter, and update the moments, and the parameter if it is FP32, in place."""
    value, slope = param.float(), grad.float()
    if adam.decay and not adam.decoupled:
        slope = slope + adam.decay * value
    mean, square = first.float(), second.float()
    mean.mul_(adam.beta1).add_(slope, alpha=_fp32(1 - adam.beta1))
    square.mul_(adam.beta2).addcmul_(slope, slope, value=_fp32(1 - adam.beta2))
    for moment, updated in ((first, mean), (second, square)):
        if updated is not moment:
            moment.copy_(updated)
    update = (square / adam.correction2).sqrt_().add_(adam.epsilon)
    torch.div(mean / adam.correction1, update, out=update)
    if adam.decay and adam.decoupled:
        update.add_(value, alpha=adam.decay)
    return value.sub_(update.mul_(adam.lr))


# SGD steps on lists of tensors.
#
# Follows ``csrc/extensions/multi_tensor/sgd.cpp`` of TransformerEngine 2.20.2 and ``common/multi_tensor/sgd.cu``. All
# arithmetic is FP32.


_FP16, _FP32 = torch.float16, torch.float32
_DTYPES = {3: [(_FP16, _FP16), (_FP32, _FP32)], 4: [(_FP16, _FP32), (_FP32, _FP32)]}


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Update weights and momenta in place.

    Args:
        noop_flag: any value but 0 leaves everything as it is.
        tensor_lists: gradients, weights, momenta and, optionally, FP16 copies of the weights, which are written.
        wd: weight decay, added to the gradient before momentum or, if ``wd_after_momentum``, after it.
        first_run: initialize the momenta with the gradients.
        scale: factor of the gradients.

    Raises:
        RuntimeError: for dtypes that TE has no kernel for. Gradients and weights must both be FP16 or both FP32;
            with FP16 copies, weights must be FP32.
    """
    dtypes = (tensor_lists[0][0].dtype, tensor_lists[1][0].dtype)
    if dtypes not in _DTYPES.get(len(tensor_lists), []):
        raise RuntimeError(
            f"multi_tensor_sgd: TransformerEngine has no SGD kernel for {dtypes[0]} gradients of {dtypes[1]} weights "
            f"in {len(tensor_lists)} lists"
        )
    if noop_flag.item():
        return
    for grad, weight, buffer, *copies in zip(*tensor_lists, strict=True):
        update, value = grad.float() * scale, weight.float()
        if wd and not wd_after_momentum:
            update.add_(value, alpha=wd)
        if momentum:
            moved = update.clone() if first_run else buffer.float() * momentum + update * (1 - dampening)
            update = update + momentum * moved if nesterov else moved
            buffer.copy_(moved)
        if wd and wd_after_momentum:
            update = update + wd * value
        weight.copy_(value - lr * update)
        for copy in copies:
            copy.copy_(weight)
