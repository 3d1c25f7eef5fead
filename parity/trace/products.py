"""Keep golden's GEMMs, so that a pass that differs little from golden need not compute them again in FP64.

A GEMM is linear: if a mistake changes the left operand from A to A + a, the result changes by ``a B``. This product of
a small change can be computed in FP32, which loses one part in ten million of it and takes half the time. If each row
is scaled by its own factor, as by another eps of a norm before it, the result's rows are scaled by the same factors. If
nothing has changed, golden's result is taken as it is.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# For each GEMM, the one of the same operands that adds nothing.
_MULTIPLY = {
    _aten.mm.default: _aten.mm.default,
    _aten.addmm.default: _aten.mm.default,
    _aten.bmm.default: _aten.bmm.default,
    _aten.baddbmm.default: _aten.bmm.default,
}
# Share of an operand's norm: with a larger change, it is another GEMM of the same shapes.
_SMALL = 0.05
# Share of a change's norm that FP32 loses.
_LOST = 1e-7
# So few rows already show that most changes are not scaled rows.
_FEW = 4
# FP32 holds products to full precision if their operands' norms are in this range.
_LEAST, _MOST = 1e-15, 1e15

Shapes = tuple[torch.Size, ...]


class _Product:
    """A GEMM of golden.

    Attributes:
        operands: the addend first if there is one.
        result: the GEMM's result.
    """

    def __init__(self, operands: tuple[Tensor, ...], result: Tensor) -> None:
        self.operands = operands
        self.result = result
        self._versions = self._current()

    def is_intact(self) -> bool:
        """Return whether nothing was written to the tensors since."""
        return self._versions == self._current()

    def _current(self) -> list[int]:
        return [x._version for x in (*self.operands, self.result)]

    @cached_property
    def right(self) -> Tensor:
        """The right operand in FP32."""
        return self.operands[-1].float()

    @property
    def multiplied(self) -> Tensor:
        """The result without the addend."""
        return self.result - self.operands[0] if len(self.operands) == 3 else self.result

    @cached_property
    def norms(self) -> tuple[float, float]:
        """The norms of the left and the right operand."""
        return _norm(self.operands[-2]), _norm(self.operands[-1])


class Products:
    """The GEMMs of a forward pass in FP64."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, Shapes], list[_Product]] = defaultdict(list)  # in order, by function and shapes

    def recorded(self) -> AbstractContextManager[Any]:
        """Keep the GEMMs that are made within the context."""
        return _Recording(self)

    def reused(self) -> AbstractContextManager[Any]:
        """Within the context, one forward pass in FP64 takes what it can from these GEMMs."""
        return _Reusing(self)


class _Recording(TorchDispatchMode):
    def __init__(self, products: Products) -> None:
        super().__init__()
        self._products = products

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_gemm(func, args, kwargs):
            self._products.made[func, _shapes(args)].append(_Product(tuple(args), result))
        return result


class _Reusing(TorchDispatchMode):
    def __init__(self, products: Products) -> None:
        super().__init__()
        self._left = {key: iter(made) for key, made in products.made.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_gemm(func, args, kwargs):
            product = next(self._left.get((func, _shapes(args)), iter(())), None)
            changed = None if product is None else _changed(product, func, args)
            if changed is not None:
                return changed
        return func(*args, **(kwargs or {}))


def _is_gemm(func: Any, args: Any, kwargs: Any) -> bool:
    return func in _MULTIPLY and not kwargs and all(x.dtype == torch.float64 for x in args)


def _shapes(operands: tuple[Tensor, ...]) -> Shapes:
    return tuple(x.shape for x in operands)


def _changed(product: _Product, func: Any, operands: tuple[Tensor, ...]) -> Tensor | None:
    """Return the GEMM of these operands computed from golden's; None if that would be less exact, or no faster."""
    *before, right = zip(operands, product.operands, strict=True)
    if not product.is_intact() or _change(*right) is not None:
        return None
    *addends, left = [_change(x, golden) for x, golden in before]
    if any(addend is not None for addend in addends):
        return None
    if left is None:
        return product.result.clone()
    if not _is_small(left, product):
        return None
    factors = _factors_of_rows(left.values, product.operands[-2])
    if factors is not None:
        return torch.addcmul(product.result, factors, product.multiplied)
    return product.result + _MULTIPLY[func](left.values.float(), product.right)


class _Change(NamedTuple):
    """The difference of an operand from golden's, in FP64, and its norm."""

    values: Tensor
    norm: float


def _change(x: Tensor, golden: Tensor) -> _Change | None:
    """Return the change of an operand; None if there is none."""
    if x.data_ptr() == golden.data_ptr() and x.stride() == golden.stride():
        return None
    change = x - golden
    norm = _norm(change)
    return _Change(change, norm) if norm != 0.0 else None


def _is_small(left: _Change, product: _Product) -> bool:
    """Return whether the left operand is golden's with a small change whose products FP32 holds to full precision."""
    golden, right = product.norms
    return _LEAST <= left.norm <= _SMALL * golden and _LEAST <= right <= _MOST


def _factors_of_rows(change: Tensor, golden: Tensor) -> Tensor | None:
    """Return what the change multiplies each row of golden's operand by, ``[..., rows, 1]``; None for
    any other change.
    """
    for rows in (slice(_FEW), slice(None)):
        some, of_golden = change[..., rows, :], golden[..., rows, :]
        squares = of_golden.square().sum(-1, keepdim=True)
        factors = (some * of_golden).sum(-1, keepdim=True) / squares.clamp_(min=torch.finfo(squares.dtype).tiny)
        if _norm(torch.addcmul(some, factors, of_golden, value=-1.0)) > _LOST * _norm(some):
            return None
    return factors


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()
