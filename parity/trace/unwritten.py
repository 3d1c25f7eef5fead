"""Fill memory as it is allocated, to find out whether a pass reads some of it that it has not written.

``torch.empty`` and its like are seen wherever they are called, also in TE's extension, which allocates by
``at::empty``. Not seen is memory that a kernel of PyTorch's or a custom operator takes for itself, that a graph or
compiled code allocates, or that comes from elsewhere, such as NumPy or ``cudaMalloc``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parity.trace.whose import allocating_line

_ALLOCATE = ("resize_", "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
# A byte of 0x7F is NaN in both FP8 formats, and 0x11 is a small number. An index or a mask that is read from memory
# should not go out of bounds, which would end CUDA's context.
_BYTES, _WHOLE, _REAL = (0x11, 0x7F), (0, 1), (0.25, math.nan)


class Filled(TorchDispatchMode):
    """Fill what is allocated within the context: with NaN, or with a small constant.

    Args:
        is_loud: whether to fill with NaN what is allocated at a place; None for everything, which asks for no places.

    Attributes:
        places: where memory was allocated, in order, if ``is_loud`` is given.
    """

    def __init__(self, is_loud: Callable[[str], bool] | None = None) -> None:
        super().__init__()
        self._is_loud = is_loud
        self._names: dict[int, str] = {}
        self.places: dict[str, None] = {}

    def watch(self, module: nn.Module) -> None:
        """Name the places in a module's forward pass by its parts."""
        self._names = {id(part): name for name, part in module.named_modules()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = args[0].numel() if func is torch.ops.aten.resize_.default else 0
        made = func(*args, **(kwargs or {}))
        is_plain = type(made) is Tensor and made.layout is torch.strided
        if is_plain and func.overloadpacket.__name__ in _ALLOCATE:
            self._fill_new(made.view(-1)[before:] if before else made)
        return made

    def _fill_new(self, x: Tensor) -> None:
        is_loud = True
        if self._is_loud is not None:
            place = allocating_line(self._names)
            self.places[place] = None
            is_loud = self._is_loud(place)
        if x.is_floating_point() and x.itemsize == 1:
            x = x.view(torch.uint8)
        is_real = x.is_floating_point() or x.is_complex()
        x.fill_((_REAL if is_real else _BYTES if x.dtype is torch.uint8 else _WHOLE)[is_loud])


_MOST_LINES = 3  # told together


def lines_read(is_read: Callable[[Collection[str]], bool], places: Iterable[str]) -> list[str]:
    """Return where the memory was allocated that is read without being written.

    Args:
        is_read: runs the pass with NaN in what is allocated at some places and a constant elsewhere, and returns
            whether that differs from the constant everywhere.
        places: all places, in order.
    """
    left, found = list(places), list[str]()
    while left and len(found) < _MOST_LINES and is_read(left):
        found.append(left[bisect_left(range(1, len(left)), True, key=lambda count: is_read(left[:count]))])
        left.remove(found[-1])
    return found
