"""Return whether a candidate that is built again gives the same bytes, and if not, where it first did not.

What one module keeps from call to call is ``remembered``'s.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from parity.passes import Tensors
from parity.result import Determinism, label_of
from parity.watching.kernel_trace import Trace, as_bytes, first_difference
from parity.watching.random_state import RandomState, kept, other_numbers

Run = Callable[[Callable[[nn.Module], None]], Tensors]
# A kernel that adds in the order in which its blocks finish does not differ each time.
_ATTEMPTS = 3


def repeat(run: Run, first: Tensors, before: RandomState, device: torch.device) -> Determinism:
    """Build and run the candidate again from the same random state, and if nothing differs, from another.

    Args:
        run: the candidate's pass, calls its argument with the newly built module.
        first: what it returned before.
        before: the random state that it started from.
        device: the kernels'.
    """
    with kept(device):
        before.restore(device)
        differing = _differing(first, run(lambda module: None))
        if differing:
            return Determinism(differing, first=_located(run, before, device))
    with other_numbers(device):
        return Determinism(drawn=_differing(first, run(lambda module: None)))


def _differing(one: Tensors, other: Tensors) -> tuple[str, ...]:
    return tuple(
        label_of(kind, name)
        for (kind, name), tensor in one.items()
        if not torch.equal(as_bytes(tensor), as_bytes(other[kind, name]))
    )


def _located(run: Run, before: RandomState, device: torch.device) -> str:
    for _ in range(_ATTEMPTS):
        traces = Trace(), Trace()
        for trace in traces:
            before.restore(device)
            with trace.of_kernels():
                run(trace.watch)
        place = first_difference(*traces)
        if place:
            return place
    return ""
