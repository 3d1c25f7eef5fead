"""How a pass stores tensors: rounded to the precision's dtype, with the noise of its freedom."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parity.formats import Format, largest, spacing
from parity.rounding.freedom import JITTER, Freedom
from parity.rounding.parts import Part, Rounding
from parity.rounding.stored import Stored

_FP32_JITTER = torch.finfo(torch.float32).eps
_HALF = 0.4999  # a little less, so that FP32 sums of it and a number that the dtype has stay below the next


class Storing:
    """What one pass stores.

    Args:
        rounding: what is rounded.
        freedom: the choices of the kernels that are modelled.
        stored: what is stored already; what this pass stores is added.
    """

    def __init__(self, rounding: Rounding, freedom: Freedom, stored: Stored) -> None:
        self.rounding = rounding
        self.freedom = freedom
        self._roundoff = torch.finfo(rounding.storage).eps / 2
        self._noise: torch.Generator | None = None
        self._stored = stored

    def store(self, x: Tensor, part: Part = "storage") -> Tensor:
        """As ``Rounding.store_part``, with what jitter the freedom has; weights are stored already."""
        if self.freedom.jitter is not None and part != "weights" and x.is_floating_point():
            is_dithered = self.freedom.dithers
            x = self._dithered(x) if is_dithered else self._jittered(x, max(_FP32_JITTER, JITTER * self._roundoff))
        rounded = self.rounding.store_part(x, part)
        if rounded is not x:
            self._stored.add(rounded)
        return rounded

    def operand(self, x: Tensor, part: Part) -> Tensor:
        """As ``store``, of what may have been stored before."""
        return x if self.is_stored(x) else self.store(x, part)

    def is_stored(self, x: Tensor) -> bool:
        """Whether storing a tensor would not change it."""
        return self.freedom.jitter is None and x in self._stored

    def see_copy(self, sources: Any, copy: Tensor) -> None:
        """What is copied of nothing but stored tensors is stored as well."""
        if all(self.is_stored(x) for x in tree_leaves(sources) if isinstance(x, Tensor)):
            self._stored.add(copy)

    def jittered_amax(self, x: Tensor) -> Tensor:
        """The largest magnitude, moved as the value may be that has it."""
        return self._jittered(largest(x), self._roundoff)

    def dithered_operand(self, x: Tensor, to_format: Format, dim: int, amax: Tensor | None) -> Tensor:
        """An operand with an error of the format's that is independent of other runs', and of twice the variance.

        The error is the one that the format makes of a number up to a factor of two smaller, drawn anew for each
        element, and scaled up again: that of another mantissa, wherever this one happens to lie between the format's
        numbers. A port may round a multiple of it, as where it scales tokens before a layer and not after.

        Args:
            x: FP32, a matrix.
            to_format: the operand's format, with ``dim`` and ``amax`` as it takes them.
        """
        smaller = self._uniform(x).add_(1.0).mul_(-0.5).exp2_()
        scaled = x * smaller
        error = to_format(scaled, dim, largest(x) if amax is None else amax) - scaled
        return error.mul_(math.sqrt(2.0)).div_(smaller).add_(x)

    def _jittered(self, x: Tensor, step: float) -> Tensor:
        return x * self._uniform(x).mul_(step).add_(1.0)

    def _dithered(self, x: Tensor) -> Tensor:
        if self.rounding.storage is torch.float32:
            return self._jittered(x, self._roundoff)
        wide = x if x.dtype is torch.float64 else x.float()
        step = spacing(wide, self.rounding.storage)
        return (wide / step).add_(0.5).add_(self._uniform(x).mul_(_HALF)).floor_().mul_(step).to(x.dtype)

    def _uniform(self, x: Tensor) -> Tensor:
        """Between -1 and 1."""
        if self._noise is None:
            self._noise = torch.Generator(x.device).manual_seed(self.freedom.jitter or 0)
        return torch.rand(x.shape, generator=self._noise, device=x.device).mul_(2.0).sub_(1.0)
