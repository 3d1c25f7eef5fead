"""Error measures of a computed tensor against its golden value.

``measure`` takes them all, in FP64. Elements where one of the two tensors is not finite cannot be measured; they are
counted and left out.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from parity.result import Errors


def relative_l2(error_norm: float, golden_norm: float) -> float:
    """``|error| / |golden|``; 0 if both are zero, infinite if golden alone is."""
    if error_norm == 0.0:
        return 0.0
    return error_norm / golden_norm if golden_norm > 0.0 else math.inf


def in_fp64(x: Tensor) -> Tensor:
    """The tensor in FP64, detached; by way of FP32, which is exact, since PyTorch widens half precision slowly."""
    x = x.detach()
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).double()


def difference(x: Tensor, golden: Tensor) -> Tensor:
    """``x - golden`` in FP64.

    Args:
        x: the computed tensor, any floating-point dtype.
        golden: its golden value, same shape.

    Raises:
        ValueError: if the shapes differ.
    """
    if x.shape != golden.shape:
        raise ValueError(f"shapes differ: computed {tuple(x.shape)}, golden {tuple(golden.shape)}")
    return in_fp64(x) - in_fp64(golden)


def max_abs(error: Tensor) -> float:
    """The largest ``|error|``, NaN if one is; 0 for empty tensors."""
    if not error.numel():
        return 0.0
    low, high = torch.aminmax(error)
    return max(abs(low.item()), abs(high.item()))


def ulp(golden: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of ``dtype``'s numbers at each element's magnitude, that of the subnormals near zero.

    Args:
        golden: finite FP64 values of any shape.
        dtype: a floating-point dtype, FP32 or narrower.

    Returns:
        FP64 tensor of golden's shape.
    """
    info = torch.finfo(dtype)
    magnitude = golden.abs().clamp_(min=info.smallest_normal)
    power_of_two = magnitude.view(torch.int64).bitwise_and_(_FP64_EXPONENT).view(torch.float64)
    return power_of_two.mul_(info.eps)


def max_ulps(error: Tensor, golden: Tensor, dtype: torch.dtype) -> float:
    """The largest ``|error|`` in ulps of ``dtype`` at golden's magnitude; 0 for empty tensors."""
    spacing = ulp(golden, dtype)
    return max_abs(torch.div(error, spacing, out=spacing))


def cosine(error_norm: float, golden_norm: float, product: float) -> float:
    """Cosine of the angle between golden and ``golden + error``; 1 if both are zero, 0 if one is.

    Args:
        error_norm: Euclidean norm of the error.
        golden_norm: Euclidean norm of the golden value.
        product: the inner product of the two.
    """
    norm = math.sqrt(max(0.0, golden_norm**2 + 2 * product + error_norm**2))
    if golden_norm * norm == 0.0:
        return 1.0 if golden_norm == norm else 0.0
    return (golden_norm**2 + product) / (golden_norm * norm)


def sqnr_db(relative_l2: float) -> float:
    """Signal to quantization noise ratio in decibels, from a relative L2 error."""
    return math.inf if relative_l2 == 0.0 else -20.0 * math.log10(relative_l2) if relative_l2 < math.inf else -math.inf


def measure(x: Tensor, golden: Tensor, dtype: torch.dtype, error: Tensor | None = None) -> Errors:
    """Every measure at once.

    Args:
        x: the computed tensor, any floating-point dtype.
        golden: its golden value, FP64, same shape.
        dtype: the dtype whose ulps count.
        error: the ``difference`` of the two, where it is at hand.

    Raises:
        ValueError: if the shapes differ.
    """
    error = difference(x, golden) if error is None else error
    golden = in_fp64(golden)
    error_norm = _norm(error)
    if math.isfinite(error_norm):
        return _measure_finite(error, error_norm, golden, dtype)
    x_finite, golden_finite = x.isfinite(), golden.isfinite()
    spoiled = ~x_finite & golden_finite
    comparable = x_finite & golden_finite
    error, golden = error[comparable], golden[comparable]
    return dataclasses.replace(
        _measure_finite(error, _norm(error), golden, dtype),
        nans=int((x.isnan() & golden_finite).sum()),
        infs=int((x.isinf() & golden_finite).sum()),
        golden_non_finite=int((~golden_finite).sum()),
        first_non_finite=_first_index(spoiled if spoiled.any() else ~golden_finite),
    )


def _measure_finite(error: Tensor, error_norm: float, golden: Tensor, dtype: torch.dtype) -> Errors:
    golden_norm = _norm(golden)
    relative = relative_l2(error_norm, golden_norm)
    return Errors(
        relative_l2=relative,
        max_abs=max_abs(error),
        max_ulps=max_ulps(error, golden, dtype),
        cosine=cosine(error_norm, golden_norm, torch.dot(error.flatten(), golden.flatten()).item()),
        sqnr_db=sqnr_db(relative),
        golden_rms=golden_norm / math.sqrt(max(1, golden.numel())),
    )


# The exponent field of an FP64 number, whose remaining bits are the power of two below its magnitude.
_FP64_EXPONENT = 0x7FF << 52


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()


def _first_index(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(index) for index in mask.nonzero()[0])
