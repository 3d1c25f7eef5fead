"""Count the time that passes of a reference would take on a nominal machine, without measuring any.

If a real clock ended the search for a cause, a slow or busy machine would find less than a fast one. So the amount of
computation ends the search, which is the same everywhere. A limit of real time may end it earlier, for users who do not
want to wait; then the result says so.
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

# The nominal machine is one core of a server CPU that runs PyTorch in FP64 (an AMD EPYC, torch 2.13.0, least squares
# over 1,131 references). The time of an operation includes recording and changing it.
_SECONDS_AN_OPERATION = 10e-6
_SECONDS_A_FLOP = 20e-12
_SECONDS_AN_ELEMENT = 2e-9

# Matrix products, with the position of the operand whose columns are summed over. ``torch.utils.flop_counter`` knows
# more operations, but imports Triton, after which a process takes more than a second to exit.
_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm: 0, _ATEN.bmm: 0, _ATEN.addmm: 1, _ATEN.baddbmm: 1}


@dataclass(frozen=True)
class Work:
    """An amount of computation.

    Attributes:
        operations: how many operations PyTorch's dispatcher sees.
        flops: the FLOPs of matrix products and convolutions.
        elements: how many elements the results have together, without views.
    """

    operations: int = 0
    flops: int = 0
    elements: int = 0

    def seconds(self, share: float = 1.0) -> float:
        """Return the time that the work takes on the nominal machine, for this share of the batch."""
        of_all = _SECONDS_A_FLOP * self.flops + _SECONDS_AN_ELEMENT * self.elements
        return _SECONDS_AN_OPERATION * self.operations + share * of_all


class OutOfTime(Exception):
    """Raised when the limit of real time is reached, to stop the search."""


@dataclass
class Clock:
    """The time that has been spent on the nominal machine, and the limit of real time.

    Attributes:
        seconds: the time on the nominal machine.
        forward: the work of a forward pass of the whole batch; zero until it is known.
        limit: the limit of real time in seconds, 0 for none.
        ends_at: when the search must end, by ``time.monotonic()``; infinite if there is no limit.
        ended: whether the search has noticed that the limit is reached.
    """

    seconds: float = 0.0
    forward: Work = field(default_factory=Work)
    limit: float = 0.0
    ends_at: float = math.inf
    ended: bool = False

    @contextmanager
    def limited_to(self, seconds: float) -> Iterator[None]:
        """Let no pass begin after so many seconds of real time within the context; 0 means no limit."""
        self.limit, self.ended = seconds, False
        self.ends_at = time.monotonic() + seconds if seconds else math.inf
        try:
            yield
        finally:
            self.ends_at, self.ended = math.inf, False

    def is_over(self) -> bool:
        """Return whether the limit of real time is reached, and remember it in ``ended``."""
        self.ended = self.ended or time.monotonic() >= self.ends_at
        return self.ended

    def check(self) -> None:
        """Raise an error if the time is over.

        Raises:
            OutOfTime: if the limit of real time is reached.
        """
        if self.is_over():
            raise OutOfTime

    def advance(self, passes: float, share: float = 1.0) -> None:
        """Count forward passes that are about to be made, each over this share of the batch.

        Raises:
            OutOfTime: if the limit of real time is reached, so that they must not be made.
        """
        self.check()
        self.seconds += passes * self.forward.seconds(share)

    def spend(self, work: Work) -> None:
        """Count work other than forward passes."""
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
        self.flops += _count_flops(func.overloadpacket, args, result)
        if not func.is_view:
            self.elements += sum(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))
        return result


def _count_flops(operation: Any, args: Sequence[Any], result: Any) -> int:
    """Return the FLOPs of a matrix product or a convolution, and 0 for anything else."""
    if operation in _PRODUCTS:
        return 2 * result.numel() * args[_PRODUCTS[operation]].shape[-1]
    return 2 * result.numel() * args[1][0].numel() if operation is _ATEN.convolution else 0
