"""Measure the error of a computed tensor against golden, and compare it with the bounds that a report shows.

``measure`` takes all measures in FP64. Elements where either tensor is not finite are counted and left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from parity.result import Errors, Kind

# Keep a tensor with its sums, so that each is computed once for all measures and statistics that use it.

# A tensor of more bytes is a weight of a large model, or its gradient. Tensors of this size that are quickly computed,
# such as squares, are not kept, because they would take several times the memory of the passes.
LARGE = 2**24


class CachedTensor:
    """A tensor and its sums, which are computed when they are first needed.

    Args:
        values: FP64 or FP32, of any shape; must not change afterwards.
        is_drawn: whether they are the error of a run that rounds independently of others (``Freedom.dithers``).
        leans: whether such an error shows how far errors lean by chance; a gradient's does.
    """

    def __init__(self, values: Tensor, is_drawn: bool = False, leans: bool = True) -> None:
        self.values = values
        self.is_drawn = is_drawn
        self.leans = leans
        self._squares: Tensor | None = None
        self._squares_over: dict[tuple[int, ...], Tensor] = {}
        self._products: dict[CachedTensor, float] = {}

    @cached_property
    def norm(self) -> float:
        """The Euclidean norm. It adds up the sums of rows, which is more accurate in FP32 than a single sum."""
        rows = self.squares_over((self.values.dim() - 1,)) if self.values.dim() else self.squares
        return math.sqrt(rows.sum(dtype=torch.float64).item())

    @property
    def total(self) -> float:
        """The sum of all squares."""
        return self.norm**2

    @property
    def root_mean_square(self) -> float:
        """The root mean square of the elements; 0 if there are none."""
        return self.norm / math.sqrt(max(1, self.values.numel()))

    @property
    def is_finite(self) -> bool:
        """Return whether every element is finite."""
        return math.isfinite(self.norm)

    @property
    def squares(self) -> Tensor:
        """The square of each element."""
        if self._squares is not None:
            return self._squares
        squares = self.values.square()
        if squares.nbytes <= LARGE:
            self._squares = squares
        return squares

    @cached_property
    def largest_in_rows(self) -> Tensor:
        """The largest magnitude along the last dimension."""
        squares = self.squares.amax(-1) if self.values.dim() else self.squares
        return squares.sqrt()

    @cached_property
    def max_abs(self) -> float:
        """The largest magnitude, NaN if any element is NaN, or 0 for an empty tensor."""
        return self.largest_in_rows.max().item() if self.values.numel() else 0.0

    def squares_over(self, dims: tuple[int, ...]) -> Tensor:
        """Return the sums of squares over these dimensions, of which there is at least one, in ascending order."""
        if dims not in self._squares_over:
            last = self.values.dim() - 1
            if dims[-1] == last and len(dims) > 1:
                self._squares_over[dims] = self.squares_over((last,)).sum(dims[:-1])
            elif last not in dims and len(dims) == last:
                self._squares_over[dims] = over_rows(self.squares)
            else:
                self._squares_over[dims] = self.squares.sum(dims)
        return self._squares_over[dims]

    def dot(self, other: CachedTensor) -> float:
        """Return the inner product with a tensor of the same shape."""
        if other is self:
            return self.total
        if other not in self._products:
            dtype = torch.promote_types(self.values.dtype, other.values.dtype)
            one, two = (x.values.flatten().to(dtype) for x in (self, other))
            self._products[other] = torch.dot(one, two).item()
        return self._products[other]

    def dots_in_rows(self, other: CachedTensor) -> Tensor:
        """Return the inner products along the last dimension with a tensor of the same shape."""
        return (self.values * other.values).sum(-1) if self.values.dim() else self.values * other.values


TINY = 1e-300
"""Stands for a norm of zero in a denominator."""


def norm_of(x: Tensor) -> float:
    """Return the L2 norm of all elements."""
    return torch.linalg.vector_norm(x).item()


def over_rows(x: Tensor) -> Tensor:
    """Return the sums over all dimensions but the last, by a matrix product, which takes half the time of ``sum``."""
    rows = x.flatten(0, -2)
    return torch.mv(rows.T, rows.new_ones(len(rows)))


# Error measures of a computed tensor against its golden value.


_BINADES = 2.0**64

# The integer type of a number's size, and the mask of its exponent. These bits are the power of two at or below it.
_EXPONENT = {torch.float64: (torch.int64, 0x7FF << 52), torch.float32: (torch.int32, 0xFF << 23)}


def relative_l2(error_norm: float, golden_norm: float) -> float:
    """Return ``|error| / |golden|``: 0 if both are zero, infinite if only golden is."""
    if error_norm == 0.0:
        return 0.0
    return error_norm / golden_norm if golden_norm > 0.0 else math.inf


def difference(x: Tensor, golden: Tensor) -> Tensor:
    """Return ``x - golden`` in FP64.

    Args:
        x: the computed tensor, any floating-point dtype.
        golden: its golden value, same shape.

    Raises:
        ValueError: if the shapes differ.
    """
    if x.shape != golden.shape:
        raise ValueError(f"shapes differ: computed {tuple(x.shape)}, golden {tuple(golden.shape)}")
    return x.detach().to(torch.float64, copy=True).sub_(golden.detach())


def max_abs(error: Tensor) -> float:
    """Return the largest ``|error|``, NaN if any element is NaN, or 0 for an empty tensor."""
    if not error.numel():
        return 0.0
    return max(abs(error.amin().item()), abs(error.amax().item()))  # takes a third of aminmax's time


def all_finite(x: Tensor) -> bool:
    """Return whether every element is finite, in a tenth of the time that ``isfinite().all()`` takes."""
    return math.isfinite(max_abs(x))


def _power_of_two(golden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the power of two at or below each magnitude, but at least the smallest normal number of ``dtype``."""
    magnitude = golden.abs().clamp_(min=torch.finfo(dtype).smallest_normal)
    as_integers, exponent = _EXPONENT[golden.dtype]
    return magnitude.view(as_integers).bitwise_and_(exponent).view(golden.dtype)


def cosine(error_norm: float, golden_norm: float, product: float) -> float:
    """Return the cosine of the angle between golden and ``golden + error``: 1 if both are zero, 0 if one is.

    Args:
        error_norm: Euclidean norm of the error.
        golden_norm: Euclidean norm of the golden value.
        product: the inner product of golden and error.
    """
    norm = math.sqrt(max(0.0, golden_norm**2 + 2 * product + error_norm**2))
    if golden_norm * norm == 0.0:
        return 1.0 if golden_norm == norm else 0.0
    return (golden_norm**2 + product) / (golden_norm * norm)


def sqnr_db(relative_l2: float) -> float:
    """Return the signal to quantization noise ratio in decibels, from a relative L2 error."""
    return math.inf if relative_l2 == 0.0 else -20.0 * math.log10(relative_l2) if relative_l2 < math.inf else -math.inf


def measure(x: Tensor, golden: Tensor, dtype: torch.dtype) -> Errors:
    """Return all measures of a computed tensor.

    Args:
        x: the computed tensor, any floating-point dtype.
        golden: its golden value, FP64, same shape.
        dtype: the dtype whose ulps count.

    Raises:
        ValueError: if the shapes differ.
    """
    return Measures(CachedTensor(golden.detach().double()), dtype).of(x, CachedTensor(difference(x, golden)))


class Measures:
    """The measures of several computed tensors against one golden value.

    Args:
        golden: FP64 or FP32, like the errors.
        dtype: the dtype whose ulps count.
    """

    def __init__(self, golden: CachedTensor, dtype: torch.dtype) -> None:
        self._golden = golden
        self._dtype = dtype

    @cached_property
    def _per_ulp(self) -> Tensor:
        """The reciprocals of the ulps, scaled so that FP32 can hold them and errors in ulps."""
        return _power_of_two(self._golden.values, self._dtype).mul_(_BINADES).reciprocal_()

    def of(self, x: Tensor, error: CachedTensor) -> Errors:
        """Return all measures of one of the tensors.

        Args:
            x: the computed tensor, any floating-point dtype.
            error: its ``difference`` from golden.
        """
        if error.is_finite:
            return _measure_finite(error, self._golden, self._per_ulp, self._dtype)
        golden = self._golden.values
        x_finite, golden_finite = x.isfinite(), golden.isfinite()
        spoiled = ~x_finite & golden_finite
        comparable = x_finite & golden_finite
        compared = golden[comparable]
        return dataclasses.replace(
            _measure_finite(
                CachedTensor(error.values[comparable]), CachedTensor(compared), self._per_ulp[comparable], self._dtype
            ),
            nans=int((x.isnan() & golden_finite).sum()),
            infs=int((x.isinf() & golden_finite).sum()),
            golden_non_finite=int((~golden_finite).sum()),
            first_non_finite=tuple(int(index) for index in (spoiled if spoiled.any() else ~golden_finite).nonzero()[0]),
        )


def _measure_finite(error: CachedTensor, golden: CachedTensor, per_ulp: Tensor, dtype: torch.dtype) -> Errors:
    relative = relative_l2(error.norm, golden.norm)
    return Errors(
        relative_l2=relative,
        max_abs=error.max_abs,
        max_ulps=max_abs(error.values * per_ulp) * (_BINADES / torch.finfo(dtype).eps),
        cosine=cosine(error.norm, golden.norm, error.dot(golden)),
        sqnr_db=sqnr_db(relative),
        golden_rms=golden.root_mean_square,
    )


# Compute the errors of tensors against golden in the arithmetic in which they are judged.
#
# An error is the difference of two numbers that nearly agree, so golden needs all digits of FP64. Sums over errors do
# not: FP32 holds an error to one part in 16 million in half the memory, and the speed of judging depends on memory.
# So golden is split into its FP32 value and the rest, also in FP32, and both are subtracted from a computed tensor one
# after the other. If squares or products might leave FP32's range, everything is computed in FP64.


# If a tensor's root mean square is in this range, FP32 can hold the squares and products of its elements.
_SAFE_LEAST, _SAFE_MOST = 1e-15, 1e15


class Deviations(NamedTuple):
    """Golden and the errors of tensors computed in its place, all in FP32 or all in FP64."""

    golden: CachedTensor
    errors: list[CachedTensor]


class GoldenTensor:
    """A golden tensor, with what its ``deviations`` and ``measures`` need.

    For a large tensor nothing else is kept, so that each call computes this again.

    Args:
        exact: FP64, of any shape.
    """

    def __init__(self, exact: Tensor) -> None:
        self.exact = exact.detach().double()
        self._split: tuple[CachedTensor, Tensor] | None = None
        self._measures: dict[tuple[CachedTensor, torch.dtype], Measures] = {}

    @cached_property
    def root_mean_square(self) -> float:
        """The root mean square of the elements."""
        return self._in_fp32()[0].root_mean_square

    @property
    def bytes_kept(self) -> int:
        """About how much memory is kept beside golden: two FP32 copies, the squares, and each element's ulp."""
        return 0 if self._is_large else 2 * self.exact.nbytes

    def deviations(self, computed: Sequence[Tensor]) -> Deviations:
        """Return golden and the errors of tensors of the same shape and of any floating-point dtype.

        Raises:
            ValueError: if a shape differs.
        """
        golden, rest = self._in_fp32()
        if _is_held(golden):
            errors = [CachedTensor(self._subtract_golden(x, golden.values, rest)) for x in computed]
            if all(map(_is_held, errors)):
                return Deviations(golden, errors)
        return Deviations(self._in_fp64, [CachedTensor(difference(x, self.exact)) for x in computed])

    def measures(self, golden: CachedTensor, dtype: torch.dtype) -> Measures:
        """Return ``Measures`` for the errors that ``deviations`` returned, and keep them for the next precision.

        Args:
            golden: golden as ``deviations`` returned it.
            dtype: the dtype whose ulps count.
        """
        if self._is_large:
            return Measures(golden, dtype)
        return self._measures.setdefault((golden, dtype), Measures(golden, dtype))

    @property
    def _is_large(self) -> bool:
        return self.exact.nbytes > LARGE

    def _in_fp32(self) -> tuple[CachedTensor, Tensor]:
        """Return golden in FP32, and the rest that this leaves, also in FP32."""
        if self._split is not None:
            return self._split
        golden = self.exact.float()
        rest = torch.empty_like(golden)
        parts = 1 + self.exact.nbytes // LARGE  # so that the difference in FP64 takes little memory
        chunks = (torch.atleast_1d(x).chunk(parts) for x in (self.exact, golden, rest))
        for exact, near, far in zip(*chunks, strict=True):
            far.copy_(exact - near)
        split = CachedTensor(golden), rest
        if not self._is_large:
            self._split = split
        return split

    @cached_property
    def _in_fp64(self) -> CachedTensor:
        return CachedTensor(self.exact)  # shares golden's memory, and does not keep squares of a large tensor

    def _subtract_golden(self, x: Tensor, golden: Tensor, rest: Tensor) -> Tensor:
        """Return the error in FP32. If the tensor is in FP64, the error includes the digits beyond FP32."""
        if x.dtype is torch.float64 or x.shape != self.exact.shape:
            return difference(x, self.exact).float()
        return (x.detach().float() - golden).sub_(rest)


GoldenTensors = Mapping[tuple[Kind, str], GoldenTensor]


def in_fp32(x: Tensor) -> CachedTensor:
    """Return an FP64 tensor in FP32, or unchanged if FP32 cannot hold its squares."""
    narrow = CachedTensor(x.float())
    return narrow if _is_held(narrow) else CachedTensor(x)


def _is_held(x: CachedTensor) -> bool:
    return _SAFE_LEAST <= x.root_mean_square <= _SAFE_MOST or not x.values.any()


# Compare errors with the two bounds that a report shows.


@dataclass(frozen=True)
class Tolerance:
    """The largest errors that can pass, whatever the other statistics say.

    Attributes:
        relative_l2: bound on ``Errors.relative_l2``.
        max_abs: bound on ``Errors.max_abs``, in the tensor's units.
    """

    relative_l2: float
    max_abs: float


def margin(errors: Errors, bound: Tolerance) -> float:
    """Return the largest ratio of an error to its tolerance; at most 1 passes.

    The margin is infinite if the candidate or golden has a NaN or an infinity, because these cannot be compared.
    """
    if not errors.finite:
        return math.inf
    return max(_compute_ratio(errors.relative_l2, bound.relative_l2), _compute_ratio(errors.max_abs, bound.max_abs))


def _compute_ratio(error: float, bound: float) -> float:
    if error == 0.0:
        return 0.0
    return error / bound if bound > 0.0 else math.inf
