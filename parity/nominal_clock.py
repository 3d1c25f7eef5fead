"""Time on a nominal machine: what passes of a reference would take there, counted and not measured.

A search for a cause that ends by a clock finds by a clock: what one machine is told, a slower or a busy one would not
be. So the search ends by what it has computed, which is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Of the nominal machine: a core of a server's CPU that runs PyTorch in FP64 (an AMD EPYC, torch 2.13.0, least squares
# over 1,131 references); with each operation goes what it takes to watch and to change it.
_SECONDS_AN_OPERATION = 10e-6
_SECONDS_A_FLOP = 20e-12
_SECONDS_AN_ELEMENT = 2e-9


@dataclass(frozen=True)
class Work:
    """What is computed.

    Attributes:
        operations: of PyTorch, as its dispatcher sees them.
        flops: of matrix products and convolutions.
        elements: of all results but views.
    """

    operations: int = 0
    flops: int = 0
    elements: int = 0

    def seconds(self, share: float = 1.0) -> float:
        """On the nominal machine, over this share of the batch."""
        of_all = _SECONDS_A_FLOP * self.flops + _SECONDS_AN_ELEMENT * self.elements
        return _SECONDS_AN_OPERATION * self.operations + share * of_all


@dataclass
class Clock:
    """How much has been computed.

    Attributes:
        seconds: on the nominal machine.
        forward: what a forward pass of the whole batch takes; nothing until it is known.
    """

    seconds: float = 0.0
    forward: Work = field(default_factory=Work)

    def advance(self, passes: float, share: float = 1.0) -> None:
        """So many forward passes were made, each over this share of the batch."""
        self.seconds += passes * self.forward.seconds(share)

    def spend(self, work: Work) -> None:
        """Something else was computed."""
        self.seconds += work.seconds()


def work_of(compute: Callable[[], object]) -> Work:
    """What it takes to compute something."""
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
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            with suppress(Exception):  # a formula that does not know such shapes is no reason to end the pass
                self.flops += count(*args, **kwargs, out_val=result)
        if not func.is_view:
            self.elements += sum(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))
        return result
