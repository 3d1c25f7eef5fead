"""How emulated GEMMs of FP32 operands read them: rounded to TF32, to nearest even, unless another kernel choice is on.

TE asks for TF32 (``CUBLAS_COMPUTE_32F_FAST_TF32``) without saying how an operand becomes it. A small effect shows only
if there is none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from parity.cpu import kernel_choices

_DROPPED_BITS = 13


@contextmanager
def left_out() -> Iterator[None]:
    """Within the context, FP32 GEMMs of this thread compute in FP32; backward passes that are started in it too."""
    others = kernel_choices.current() - kernel_choices.FP32_OPERANDS
    with kernel_choices.kernel_choices(*others, kernel_choices.FP32_EXACT):
        yield


def operand(values: Tensor) -> Tensor:
    """FP32 values as a GEMM of this thread multiplies them; infinities and NaNs stay."""
    choices = kernel_choices.current()
    if kernel_choices.FP32_EXACT in choices:
        return values
    if kernel_choices.TF32_TRUNCATED in choices:
        return _kept(values, values.view(torch.int32).clone())
    if kernel_choices.TF32_TIES_AWAY in choices:
        return _kept(values, values.view(torch.int32) + (1 << (_DROPPED_BITS - 1)))
    return round_to_tf32(values)


def round_to_tf32(values: Tensor) -> Tensor:
    """FP32 rounded to TF32's 10 mantissa bits, nearest even; infinities and NaNs stay.

    TE computes every GEMM of FP32 operands and FP32 result in ``CUBLAS_COMPUTE_32F_FAST_TF32``, whatever PyTorch's
    ``allow_tf32`` says.
    """
    bits = values.view(torch.int32)
    rounded = bits >> _DROPPED_BITS
    rounded &= 1
    rounded += bits
    rounded += (1 << (_DROPPED_BITS - 1)) - 1
    return _kept(values, rounded)


def _kept(values: Tensor, bits: Tensor) -> Tensor:
    """The numbers of the upper bits, and the NaNs of ``values``; ``bits`` is written to."""
    bits &= -1 << _DROPPED_BITS
    result = bits.view(torch.float32)
    # A NaN's payload may be lost by a carry, or with the lower bits. A sum tells whether there is any at the cost of
    # one reading.
    return torch.where(values.isnan(), values, result) if values.sum().isnan() else result
