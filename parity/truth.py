"""One golden tensor, and the errors of what is computed in its place, in the arithmetic in which they are judged.

An error is the difference of two numbers that nearly agree, so golden needs all digits of FP64. What is summed of
errors does not: FP32 holds an error to one part in 16 million, in half of the memory, which is what judging waits for.
Golden is split into what FP32 holds of it and the rest, again in FP32, which are taken off a computed tensor one after
the other. Where squares or products might leave FP32's range, all is computed in FP64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from parity.errors import Measures, difference
from parity.result import Kind
from parity.summed import Summed

# Root mean squares of tensors of whose elements FP32 holds squares, and products with the like.
_LEAST, _MOST = 1e-15, 1e15


class Deviations(NamedTuple):
    """Golden and the errors of tensors computed in its place, all in FP32 or all in FP64."""

    golden: Summed
    errors: list[Summed]


class Truth:
    """A golden tensor.

    Args:
        exact: FP64, of any shape.
    """

    def __init__(self, exact: Tensor) -> None:
        self.exact = exact.detach().double()
        self._measures: dict[tuple[Summed, torch.dtype], Measures] = {}

    @property
    def root_mean_square(self) -> float:
        """Of the elements."""
        return self._in_fp32.root_mean_square

    def deviations(self, computed: Sequence[Tensor]) -> Deviations:
        """What tensors of the same shape, of any floating-point dtypes, are judged by.

        Raises:
            ValueError: if a shape differs.
        """
        if _is_held(self._in_fp32):
            errors = [Summed(self._difference(x)) for x in computed]
            if all(map(_is_held, errors)):
                return Deviations(self._in_fp32, errors)
        return Deviations(self._in_fp64, [Summed(difference(x, self.exact)) for x in computed])

    def measures(self, golden: Summed, dtype: torch.dtype) -> Measures:
        """Those of the errors that come with this golden of ``deviations``; kept for the next precision.

        Args:
            golden: of ``deviations``.
            dtype: the dtype whose ulps count.
        """
        return self._measures.setdefault((golden, dtype), Measures(golden, dtype))

    @cached_property
    def _in_fp32(self) -> Summed:
        return Summed(self.exact.float())

    @cached_property
    def _rest(self) -> Tensor:
        return self.exact.sub(self._in_fp32.values).float()

    @cached_property
    def _in_fp64(self) -> Summed:
        return Summed(self.exact)

    def _difference(self, x: Tensor) -> Tensor:
        """In FP32; what a tensor in FP64 has beyond it counts as well."""
        if x.dtype is torch.float64 or x.shape != self.exact.shape:
            return difference(x, self.exact).float()
        return (x.detach().float() - self._in_fp32.values).sub_(self._rest)


Truths = Mapping[tuple[Kind, str], Truth]


def in_fp32(x: Tensor) -> Summed:
    """An FP64 tensor in FP32, or as it is where FP32 does not hold it."""
    narrow = Summed(x.float())
    return narrow if _is_held(narrow) else Summed(x)


def _is_held(x: Summed) -> bool:
    return _LEAST <= x.root_mean_square <= _MOST or not x.values.any()
