"""Rows of every magnitude for modules that begin with a table: what probing inputs are where inputs are ids.

A token's row is as large as the table has it, far above any eps. Within ``ScaledLookups`` each id's row is multiplied
by a power of two of its own, and rounded to the precision's dtype, in which small numbers have fewer digits. A port
looks up what the reference does, so that both are given the same rows; one that looks up something else is not probed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parity.probes import LARGEST, SMALLEST

_SMALLEST = round(math.log2(SMALLEST))
_COUNT = round(math.log2(LARGEST)) - _SMALLEST + 1
_STEP = (
    7  # prime to the count of magnitudes: ids that follow one another have others, and 0, often of all, the smallest
)
_PRIME = 1_000_003

Lookups = Counter[tuple[int, ...]]


class ScaledLookups(TorchFunctionMode):
    """Within the context, the rows of tables are scaled.

    Args:
        dtype: of the precision.

    Attributes:
        seen: how often which ids are looked up.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self.seen: Lookups = Counter()

    def around(self, call: Callable[..., Any] | None) -> Callable[..., Any]:
        """A call of a module, as in ``parity.Pair``, within this context; what was seen before is forgotten."""

        def scaled(module: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.clear()
            with self:
                return call(module, *args, **kwargs) if call else module(*args, **kwargs)

        return scaled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _IDS:
            ids = args[_IDS[func]] if len(args) > _IDS[func] else (kwargs or {})[_NAMES[func]]
            with torch._C.DisableTorchFunction():  # a trace of the module has no call of ours
                self.seen[_signature(ids)] += 1
                scaled = result * _factors(ids).to(result.dtype).unsqueeze(-1)
                rounding = scaled.detach().to(self._dtype).to(result.dtype) - scaled.detach()  # no gradient is rounded
                result.copy_(scaled + rounding)  # in place, so that the trace knows where it comes from
        return result


_IDS = {F.embedding: 0, torch.embedding: 1}
_NAMES = {F.embedding: "input", torch.embedding: "indices"}


def _factors(ids: Tensor) -> Tensor:
    return torch.exp2(((ids * _STEP) % _COUNT + _SMALLEST).float())


def _signature(ids: Tensor) -> tuple[int, ...]:
    """The same for ids in another order only where batch and sequence are exchanged."""
    return tuple(sorted({_checksum(ids), _checksum(ids.mT) if ids.dim() > 1 else _checksum(ids)}))


def _checksum(ids: Tensor) -> int:
    some = ids.flatten().long() + 1
    return int((some * torch.arange(1, len(some) + 1, device=ids.device) % _PRIME).sum())
