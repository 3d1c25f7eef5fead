"""Count time on a nominal machine: what passes of a reference would take there, counted and not measured.

If a real clock ended the search for a cause, a slower or busier machine would find less than a fast one. So the search
ends by what it has computed, which is the same everywhere. A limit of real time, for those who wait, may end it
earlier; then it says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The nominal machine is a core of a server's CPU that runs PyTorch in FP64 (an AMD EPYC, torch 2.13.0, least squares
# over 1,131 references); the time of an operation includes watching and changing it.
_SECONDS_AN_OPERATION = 10e-6
_SECONDS_A_FLOP = 20e-12
_SECONDS_AN_ELEMENT = 2e-9

# Matrix products, with the position of the operand whose columns are summed over. ``torch.utils.flop_counter`` knows
# more operations, but imports Triton, after which a process takes more than a second to exit.
_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm: 0, _ATEN.bmm: 0, _ATEN.addmm: 1, _ATEN.baddbmm: 1}


@dataclass(frozen=True)
class Work:
    """Hold what is computed.

    Attributes:
        operations: PyTorch's operations, as its dispatcher sees them.
        flops: those of matrix products and convolutions.
        elements: those of all results but views.
    """

    operations: int = 0
    flops: int = 0
    elements: int = 0

    def seconds(self, share: float = 1.0) -> float:
        """Return its time on the nominal machine, for this share of the batch."""
        of_all = _SECONDS_A_FLOP * self.flops + _SECONDS_AN_ELEMENT * self.elements
        return _SECONDS_AN_OPERATION * self.operations + share * of_all


class OutOfTime(Exception):
    """Raised when the limit of real time is reached, so that nothing more may be computed."""


@dataclass
class Clock:
    """Counts how much has been computed.

    Attributes:
        seconds: the time on the nominal machine.
        forward: what a forward pass of the whole batch takes; no work until it is known.
        ends_at: which second of ``time.monotonic()`` ends the search; infinite for none.
        ended: whether the search was found to have reached that second.
    """

    seconds: float = 0.0
    forward: Work = field(default_factory=Work)
    ends_at: float = math.inf
    ended: bool = False

    @contextmanager
    def limited_to(self, seconds: float) -> Iterator[None]:
        """Let no pass begin within the context after so many seconds of real time, 0 for no limit."""
        self.ends_at, self.ended = time.monotonic() + seconds if seconds else math.inf, False
        try:
            yield
        finally:
            self.ends_at, self.ended = math.inf, False

    def is_over(self) -> bool:
        """Return whether the limit of real time is reached; remember that in ``ended``."""
        self.ended = self.ended or time.monotonic() >= self.ends_at
        return self.ended

    def check(self) -> None:
        """Raise ``OutOfTime`` if the time is over.

        Raises:
            OutOfTime: if the limit of real time is reached.
        """
        if self.is_over():
            raise OutOfTime

    def advance(self, passes: float, share: float = 1.0) -> None:
        """Count so many forward passes, each over this share of the batch, before they are made.

        Raises:
            OutOfTime: if the limit of real time is reached, so that they are not to be made.
        """
        self.check()
        self.seconds += passes * self.forward.seconds(share)

    def spend(self, work: Work) -> None:
        """Count other work."""
        self.seconds += work.seconds()


def work_of(compute: Callable[[], object]) -> Work:
    """Return the work of computing something."""
    with _Meter() as meter:
        compute()
    return Work(meter.operations, meter.flops, meter.elements)


class _Meter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = self.flops = self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.operations += 1
        self.flops += _flops(func.overloadpacket, args, result)
        if not func.is_view:
            self.elements += sum(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))
        return result


def _flops(operation: Any, args: Sequence[Any], result: Any) -> int:
    """Return the FLOPs of a matrix product or a convolution; 0 for anything else."""
    if operation in _PRODUCTS:
        return 2 * result.numel() * args[_PRODUCTS[operation]].shape[-1]
    return 2 * result.numel() * args[1][0].numel() if operation is _ATEN.convolution else 0
