"""What a port's own casts between the precision's dtype and FP32 round.

Plain lines often compute in FP32: ``x.float()`` hands back a gradient that is rounded to x's dtype, and ``.type_as(x)``
hands on a rounded value. Numbers that are all alike there, such as a cross-entropy's gradients at the labels, are all
rounded the same way, and everything behind leans by that. The model runs the reference in FP32, where these calls do
nothing: so they are watched, and what a port holds in FP32 (*wide*) is told from what it holds in the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CAST = "_to_copy"
"""ATen's name of a cast, among the functions that a port calls."""

_CASTS = (Tensor.to, Tensor.type, Tensor.type_as, Tensor.float)
_WIDE = "_parity_is_wide"


class Casts(TorchFunctionMode):
    """Within the context, casts of activations in an FP32 module round as in one of a 16-bit dtype.

    Args:
        store: rounds to the dtype.
        alone: makes a context in which nothing else is rounded.
    """

    def __init__(self, store: Callable[[Tensor], Tensor], alone: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._store, self._alone = store, alone

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else None
        if _is_of_activation(x):
            if func in _CASTS:
                return self._cast(func, args, kwargs)
            if kwargs.get("dtype") is torch.float32 and not _is_wide(x):
                args = (_marked(_Widened.apply(x, self._stored_alone)), *args[1:])
        result = func(*args, **kwargs)
        if any(_is_wide(given) for given in tree_leaves((args, kwargs))):
            for each in tree_leaves(result):
                _marked(each)
        return result

    def _stored_alone(self, x: Tensor) -> Tensor:
        with self._alone():
            return self._store(x)

    def _cast(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, result = args[0], func(*args, **kwargs)
        if not _is_of_activation(result):  # of another dtype, or without a gradient: PyTorch has done what was asked
            return result
        becomes_wide = _becomes_wide(func, x, (*args[1:], *kwargs.values()))
        if becomes_wide and not _is_wide(x):
            result = _Widened.apply(result, self._stored_alone)
        elif not becomes_wide and _is_wide(x):
            result = _Narrowed.apply(result, self._stored_alone)
        return _marked(result) if becomes_wide else result


def _becomes_wide(func: Any, x: Tensor, asked: tuple[Any, ...]) -> bool:
    """Whether a port holds what a cast returns in FP32.

    A dtype that is FP32 here is either named, or another tensor's, which is FP32 in the model alone. Nobody names FP32
    for what is FP32 already, nor the dtype for what has it.
    """
    if func is Tensor.float:
        return True
    for one in asked:
        if isinstance(one, Tensor):
            return _is_wide(one)
        if isinstance(one, torch.dtype):
            return not _is_wide(x)
    return _is_wide(x)


class _Narrowed(torch.autograd.Function):
    """Rounds a value, and hands its gradient back as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, store: Callable[[Tensor], Tensor]) -> Tensor:
        return store(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Widened(torch.autograd.Function):
    """Hands a value on as it is, and rounds its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, store: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.store = store
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.store(gradient), None


def _is_of_activation(x: Any) -> bool:
    """Whether the model has it in FP32 and it has a gradient, which tables of angles and masks have not."""
    return isinstance(x, Tensor) and x.dtype is torch.float32 and x.requires_grad


def _is_wide(x: Any) -> bool:
    return isinstance(x, Tensor) and getattr(x, _WIDE, False)


def _marked(x: Any) -> Any:
    """The value; a tensor in FP32 is wide from now on."""
    if isinstance(x, Tensor) and x.dtype is torch.float32:
        setattr(x, _WIDE, True)
    return x
