"""Tensors whose shape and dtype are known, and whose numbers are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class UnreadTensor(Tensor):
    """A tensor whose numbers are read whenever something computes with it, and not kept.

    Args:
        read: returns the numbers.
        shape, dtype, device: those of what it returns.
    """

    @staticmethod
    def __new__(
        cls, read: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: Any = None
    ) -> UnreadTensor:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(self, read: Callable[[], Tensor], *_: Any) -> None:
        self._read = read

    def is_pinned(self, *_: Any) -> bool:  # asked before anything is read
        return False

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(UnreadTensor, lambda x: x._read(), (args, kwargs or {}))
        return func(*args, **kwargs)
