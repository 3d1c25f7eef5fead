"""Runs code that builds modules and tensors so that they get shapes and dtypes, but neither memory nor values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

_META = torch.device("meta")
_MOVES = (Tensor.cpu, Tensor.cuda)
# Values that nothing holds need not be drawn; on the meta device PyTorch goes a long way to draw none.
_DRAWS = (Tensor.normal_, Tensor.uniform_)
_INITS = (init.normal_, init.uniform_, init.kaiming_uniform_)
_DRAWN = (torch.randn, torch.rand)


@contextmanager
def without_memory() -> Iterator[None]:
    """Every tensor that is created or moved inside lies on the meta device, whatever device the code names.

    Code that reads a tensor's values, or that mixes in real tensors, raises inside as it does on any meta tensor.
    """
    with torch.device("meta"), _EveryDeviceIsMeta():
        yield


class _EveryDeviceIsMeta(TorchFunctionMode):
    """Replaces devices in the arguments of PyTorch's functions; ``torch.device("meta")`` alone yields to them."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _MOVES or func in _DRAWS:
            return args[0]
        named = dict(kwargs or {})
        if func in _INITS:
            return named["tensor"] if "tensor" in named else args[0]
        # A CPU generator cannot draw on the meta device, and nothing is drawn there.
        named.pop("generator", None)
        if named.get("device") is not None:
            named["device"] = _META
        if func in _DRAWN:
            func = torch.empty
        if func is torch.empty_like and not named.keys() - {"device"} and args[0].is_contiguous():
            return torch.empty(args[0].shape, dtype=args[0].dtype)  # which PyTorch makes in a twentieth of the time
        moves = func is Tensor.to
        return func(*[_META if _names_device(arg, moves) else arg for arg in args], **named)


def _names_device(argument: Any, moves: bool) -> bool:
    """Whether a positional argument is a device; ``Tensor.to`` takes one as a string or index, too."""
    if isinstance(argument, torch.device):
        return True
    return moves and isinstance(argument, (str, int)) and not isinstance(argument, bool)
