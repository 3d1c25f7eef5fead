"""Golden's GEMMs, kept so that a pass which differs from golden by little need not compute them again in FP64.

A GEMM is linear: where a mistake changes the left operand from A to A + a, the result changes by ``a B``. This product
of a small change needs FP32 only, which costs it one part in ten million and takes half the time. Where each row is
scaled by a factor of its own, as by another eps of a norm before it, the result's rows are scaled by the same factors.
Where nothing has changed, golden's result is taken as it is.
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
# By GEMM, the one of the same operands that adds nothing.
_MULTIPLY = {
    _aten.mm.default: _aten.mm.default,
    _aten.addmm.default: _aten.mm.default,
    _aten.bmm.default: _aten.bmm.default,
    _aten.baddbmm.default: _aten.bmm.default,
}
# Of an operand's norm: a larger change is none of this GEMM, but another one of the same shapes.
_SMALL = 0.05
# Of a change's norm: what FP32 loses of it.
_LOST = 1e-7
# Rows that tell of most changes that they do not scale rows.
_FEW = 4
# Norms of operands whose products FP32 holds to full precision.
_LEAST, _MOST = 1e-15, 1e15

Shapes = tuple[torch.Size, ...]


class _Product:
    """A GEMM of golden.

    Attributes:
        operands: the addend first where there is one.
        result: of the GEMM.
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
        """The result but for the addend."""
        return self.result - self.operands[0] if len(self.operands) == 3 else self.result

    @cached_property
    def norms(self) -> tuple[float, float]:
        """Of the left and the right operand."""
        return _norm(self.operands[-2]), _norm(self.operands[-1])


class Products:
    """The GEMMs of a forward pass in FP64."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, Shapes], list[_Product]] = defaultdict(list)  # in order, by function and shapes

    def recorded(self) -> AbstractContextManager[Any]:
        """Keeps the GEMMs that are made inside."""
        return _Recording(self)

    def reused(self) -> AbstractContextManager[Any]:
        """One forward pass in FP64 inside takes from these GEMMs what it can."""
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
    """Return the GEMM of these operands by way of golden's; None if that would be less exact, or no faster."""
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
    """What an operand differs by from golden's, in FP64, and its norm."""

    values: Tensor
    norm: float


def _change(x: Tensor, golden: Tensor) -> _Change | None:
    """None if there is none."""
    if x.data_ptr() == golden.data_ptr() and x.stride() == golden.stride():
        return None
    change = x - golden
    norm = _norm(change)
    return _Change(change, norm) if norm != 0.0 else None


def _is_small(left: _Change, product: _Product) -> bool:
    """Whether the change of the left operand is one of golden's, and FP32 holds its products to full precision."""
    golden, right = product.norms
    return _LEAST <= left.norm <= _SMALL * golden and _LEAST <= right <= _MOST


def _factors_of_rows(change: Tensor, golden: Tensor) -> Tensor | None:
    """What each row of golden's operand is multiplied by in the change, ``[..., rows, 1]``; None in another change."""
    for rows in (slice(_FEW), slice(None)):
        some, of_golden = change[..., rows, :], golden[..., rows, :]
        squares = of_golden.square().sum(-1, keepdim=True)
        factors = (some * of_golden).sum(-1, keepdim=True) / squares.clamp_(min=torch.finfo(squares.dtype).tiny)
        if _norm(torch.addcmul(some, factors, of_golden, value=-1.0)) > _LOST * _norm(some):
            return None
    return factors


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()
