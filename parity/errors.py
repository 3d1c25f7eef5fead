"""Error measures: each a pure function of a computed tensor and its golden value.

All of them compute in FP64 and take tensors of one shape. Elements where the golden value itself is not finite cannot
be measured; ``measure`` counts them and leaves them out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Errors:
    """How far a tensor is from its golden value.

    Attributes:
        relative_l2: ``|x - golden| / |golden|`` in the Euclidean norm; infinite if only the golden value is all zero.
        max_abs: the largest ``|x - golden|``, in the tensor's own units.
        max_ulps: the largest distance in units in the last place of the compared dtype, at golden's magnitude.
        cosine: the cosine of the angle between the two, as flat vectors; 1 if both are all zero.
        sqnr_db: signal to quantization noise ratio, ``-20 log10(relative_l2)``; infinite if there is no error.
        golden_rms: root mean square of the golden value, which gives ``max_abs`` a scale.
        nans: NaNs in the computed tensor where the golden value is finite.
        infs: infinities in the computed tensor where the golden value is finite.
        golden_non_finite: elements whose golden value is NaN or infinite.
        first_non_finite: index of the first NaN or infinity that is counted above, in ``x`` or else in golden.
    """

    relative_l2: float
    max_abs: float
    max_ulps: float
    cosine: float
    sqnr_db: float
    golden_rms: float
    nans: int = 0
    infs: int = 0
    golden_non_finite: int = 0
    first_non_finite: tuple[int, ...] | None = None

    @property
    def finite(self) -> bool:
        """Whether every element of both tensors is finite."""
        return self.nans == self.infs == self.golden_non_finite == 0


def relative_l2(x: Tensor, golden: Tensor) -> float:
    """``|x - golden| / |golden|``; 0 if both are all zero, infinite if golden alone is."""
    error, norm = _norm(x - golden), _norm(golden)
    if error == 0.0:
        return 0.0
    return error / norm if norm > 0.0 else math.inf


def max_abs(x: Tensor, golden: Tensor) -> float:
    """The largest ``|x - golden|``; 0 for empty tensors."""
    return (x - golden).abs().max().item() if x.numel() else 0.0


def ulp(golden: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of ``dtype``'s numbers at each element's magnitude, that of the subnormals near zero.

    Args:
        golden: finite FP64 values of any shape.
        dtype: a floating-point dtype.

    Returns:
        FP64 tensor of golden's shape.
    """
    info = torch.finfo(dtype)
    magnitude = golden.abs().clamp(min=info.smallest_normal)
    _, exponent = torch.frexp(magnitude)  # magnitude = m 2^exponent with m in [0.5, 1)
    return torch.ldexp(torch.full_like(golden, info.eps), exponent - 1)


def max_ulps(x: Tensor, golden: Tensor, dtype: torch.dtype) -> float:
    """The largest ``|x - golden|`` in ulps of ``dtype`` at golden's magnitude; 0 for empty tensors."""
    return ((x - golden).abs() / ulp(golden, dtype)).max().item() if x.numel() else 0.0


def cosine(x: Tensor, golden: Tensor) -> float:
    """Cosine of the angle between two tensors as flat vectors; 1 if both are zero, 0 if one is."""
    norms = _norm(x) * _norm(golden)
    if norms == 0.0:
        return 1.0 if _norm(x) == _norm(golden) else 0.0
    return torch.dot(x.flatten(), golden.flatten()).item() / norms


def sqnr_db(x: Tensor, golden: Tensor) -> float:
    """Signal to quantization noise ratio in decibels."""
    error = relative_l2(x, golden)
    return math.inf if error == 0.0 else -20.0 * math.log10(error) if math.isfinite(error) else -math.inf


def measure(x: Tensor, golden: Tensor, dtype: torch.dtype) -> Errors:
    """Every measure at once.

    Args:
        x: the computed tensor, any floating-point dtype.
        golden: its golden value, FP64, same shape.
        dtype: the dtype whose ulps count.

    Raises:
        ValueError: if the shapes differ.
    """
    if x.shape != golden.shape:
        raise ValueError(f"shapes differ: computed {tuple(x.shape)}, golden {tuple(golden.shape)}")
    x, golden = x.detach().double(), golden.detach().double()
    x_finite, golden_finite = x.isfinite(), golden.isfinite()
    comparable = x_finite & golden_finite
    clean = bool(comparable.all())
    nans = int((x.isnan() & golden_finite).sum())
    infs = int((x.isinf() & golden_finite).sum())
    first = None if clean else _first_index(~x_finite & golden_finite if nans + infs else ~golden_finite)
    golden_rms = _rms(golden[golden_finite])
    if not clean:
        x, golden = x[comparable], golden[comparable]
    return Errors(
        relative_l2=relative_l2(x, golden),
        max_abs=max_abs(x, golden),
        max_ulps=max_ulps(x, golden, dtype),
        cosine=cosine(x, golden),
        sqnr_db=sqnr_db(x, golden),
        golden_rms=golden_rms,
        nans=nans,
        infs=infs,
        golden_non_finite=int((~golden_finite).sum()),
        first_non_finite=first,
    )


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()


def _rms(x: Tensor) -> float:
    return _norm(x) / math.sqrt(x.numel()) if x.numel() else 0.0


def _first_index(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(index) for index in mask.nonzero()[0])
