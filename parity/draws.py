"""What is drawn for weights and inputs, drawn once: each precision begins from the same seed again.

What a generator gives depends on its state alone, so that what it gave in the same state before can be copied, which
takes a tenth of the time or less.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from parity.machine import host

# Draws of fewer elements take no longer than to look for them.
_FEWEST = 4096
# Bytes that may be kept where the system does not tell how many are free.
_MOST = 2**28


class Draws:
    """Tensors as a CPU's generator filled them, by its state before."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Tensor, Tensor]] = {}  # the values, and the state after
        free = host.free_memory()
        self._left = _MOST if free is None else host.share_to_keep(free)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Within the context, tensors are filled with what was drawn before; what was not is drawn, and kept."""
        normal, uniform = self._filling(Tensor.normal_), self._filling(Tensor.uniform_)
        with mock.patch.object(Tensor, "normal_", normal), mock.patch.object(Tensor, "uniform_", uniform):
            yield

    def _filling(self, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fill(tensor: Tensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:
            if not _is_repeatable(tensor, (*args, *kwargs.values())):
                return draw(tensor, *args, generator=generator, **kwargs)
            generator = generator or torch.default_generator
            state = generator.get_state().numpy().tobytes()
            key = draw.__name__, state, tensor.shape, tensor.stride(), tensor.dtype, args, tuple(sorted(kwargs.items()))
            if key in self._made:
                values, after = self._made[key]
                generator.set_state(after)
                return tensor.copy_(values)
            drawn = draw(tensor, *args, generator=generator, **kwargs)
            if tensor.nbytes <= self._left:
                self._left -= tensor.nbytes
                self._made[key] = tensor.detach().clone(), generator.get_state()
            return drawn

        return fill


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
