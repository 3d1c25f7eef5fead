"""What is drawn for weights and inputs, drawn once: each precision begins from the same seed again.

What a generator gives depends on its state alone, so that what it gave in the same state before can be copied, which
takes a tenth of the time or less.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parity.machine import host

# Draws of fewer elements take no longer than to look for them.
_FEWEST = 4096
# What ``nn.init`` and inputs are drawn with.
_FILLING = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
# Bytes that may be kept where the system does not tell how many are free.
_MOST = 2**28


class Draws:
    """Tensors as a CPU's generator filled them, by its state before."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Tensor, Tensor]] = {}  # the values, and the state after
        free = host.free_memory()
        self._left = _MOST if free is None else host.share_to_keep(free)

    def repeated(self) -> AbstractContextManager[object]:
        """Within the context, tensors are filled with what was drawn before; what was not is drawn, and kept."""
        return _Repeating(self)

    def fill(self, draw: Callable[..., Tensor], tensor: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """Fill a tensor as ``draw(tensor, *args, **kwargs)`` does, which is ATen's ``normal_`` or ``uniform_``."""
        numbers = {name: value for name, value in kwargs.items() if name != "generator"}
        if not _is_repeatable(tensor, (*args, *numbers.values())):
            return draw(tensor, *args, **kwargs)
        generator = kwargs.get("generator") or torch.default_generator
        state = generator.get_state().numpy().tobytes()
        details = tensor.shape, tensor.stride(), tensor.dtype, tuple(args), tuple(sorted(numbers.items()))
        key = draw, state, *details
        if key in self._made:
            values, after = self._made[key]
            generator.set_state(after)
            return tensor.copy_(values)
        drawn = draw(tensor, *args, **kwargs)
        if tensor.nbytes <= self._left:
            self._left -= tensor.nbytes
            self._made[key] = tensor.detach().clone(), generator.get_state()
        return drawn


class _Repeating(TorchDispatchMode):
    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FILLING:
            return self._draws.fill(func, args[0], args[1:], kwargs)
        return func(*args, **kwargs)


def _is_repeatable(tensor: Tensor, arguments: Sequence[Any]) -> bool:
    """Whether what fills a tensor depends on a CPU's generator and numbers alone, and takes some time."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
    return is_plain and tensor.numel() >= _FEWEST and not any(isinstance(x, Tensor) for x in arguments)


_KEPT: dict[tuple[Hashable, ...], Draws] = {}


def draws_of(subject: Hashable, *details: Hashable) -> Draws:
    """Those of a subject, with these details; kept until another subject's are asked for."""
    if any(kept[0] != subject for kept in _KEPT):
        _KEPT.clear()
    key = subject, *details
    if key not in _KEPT:
        _KEPT[key] = Draws()
    return _KEPT[key]


def forget_draws() -> None:
    """Let go of all."""
    _KEPT.clear()
