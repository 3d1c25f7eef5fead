"""Adam steps on lists of tensors.

Follows ``csrc/extensions/multi_tensor/adam.cpp`` of TransformerEngine 2.20.2 and ``common/multi_tensor/adam.cu``. All
arithmetic is FP32, whatever the dtypes of gradients, parameters and moments; results are rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.cpu.enums import TORCH_DTYPE
from parity.cpu.quantized import float8

__all__ = [
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_param_remainder",
]

_Lists = Sequence[Sequence[Tensor]]


@dataclass(frozen=True)
class Step:
    """What one step of Adam needs besides tensors; each number is one of FP32.

    Attributes:
        correction1: what the first moment is divided by, ``1 - beta1**step``, or 1.
        correction2: what the second moment is divided by.
        decoupled: AdamW: the decay goes to the update (mode 1), else to the gradient (mode 0).
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


@torch.no_grad()
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
        noop_flag: not looked at: infinities and NaNs go through.
        tensor_lists: gradients, parameters, first and second moments, and, if there is a fifth list, FP32 parameters
            that take the place of the parameters, which become their rounded copies.
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


@torch.no_grad()
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
    """As ``multi_tensor_adam``, with numbers that may change in tensors of one element.

    Args:
        noop_flag: 1 leaves everything as it is.
        inv_scale: times the gradients, which are overwritten.
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


@torch.no_grad()
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
    """As ``multi_tensor_adam``, for FP32 parameters kept as BF16 and a remainder.

    Args:
        tensor_lists: the fifth list has int16 remainders: an FP32 parameter's bits are those of the BF16 parameter, as
            upper half, plus the remainder.
    """
    adam = _step(lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)
    for grad, param, first, second, remainder in zip(*tensor_lists, strict=True):
        bits = (param.view(torch.int16).int() << 16) + remainder.int()
        updated = _update(grad, bits.view(torch.float32), first, second, adam).view(torch.int32)
        remainder.copy_((updated << 16) >> 16)
        param.view(torch.int16).copy_((updated - remainder.int()) >> 16)


@torch.no_grad()
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
    """As ``multi_tensor_adam``, for parameters that are FP8 codes with delayed scaling.

    Args:
        tensor_lists: gradients, uint8 codes, first and second moments, FP32 parameters, and, FP32 of one element each,
            scales, amaxes (raised to the parameter's largest magnitude) and inverse scales.
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
    """The new FP32 parameter; the moments are updated in place."""
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
    return value - update.mul_(adam.lr)
