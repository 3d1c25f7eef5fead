"""Choices: which of many numbers are the largest, such as a token's experts, where rounding decides it.

A choice that falls otherwise is no small error: the token is another expert's. Which tokens these are is chance, so
that a run of the rounding model makes other ones than a faithful port: it expects errors that a port does not have,
which would hide mistakes, and none where a port has them. So what a port chose is seen while it runs, wherever the
model's choices are rounding's or the port fails, and the model chooses alike wherever the numbers are nearer to each
other than their errors. These are measured, call by call, as in ``parity.rounding.kinks``. A choice that rounding does
not explain stays the port's own, and its error a mistake's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parity.rounding.aten_calls import LARGEST_FEW
from parity.rounding.kinks import WIDTH
from parity.rounding.phase import NO_BACKWARD

# Deviations of a run's own error within which its choice may be another's: two errors that share nothing differ by the
# root of 2 times what one has.
_WIDTH = math.sqrt(2.0) * WIDTH
# A normal error's standard deviation over the median of its magnitude. A median, since an earlier choice that fell
# otherwise spoils a few rows altogether.
_DEVIATION = 1.4826
_FP32 = torch.finfo(torch.float32).eps


class Choices:
    """The choices of one forward pass, in the order of their calls.

    Args:
        made: by the port, ``[rows, chosen]`` of each call; what it made elsewhere is left to the model.
        exact: the numbers, as a pass without the precision's roundings has them.

    Attributes:
        values: the numbers of each call, ``[rows, numbers]``.
        own: which are the largest of them, ``[rows, chosen]``, in no order.
    """

    def __init__(self, made: Sequence[Tensor] = (), exact: Sequence[Tensor] = ()) -> None:
        self.values: list[Tensor] = []
        self.own: list[Tensor] = []
        self._made, self._exact = made, exact

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """What a call returns, with the port's choice in each row where rounding explains it."""
        count = _chosen_of_last(func, args, kwargs)
        if count is None:
            return result
        values = args[0].detach().flatten(0, -2)
        own = result[1].flatten(0, -2)
        self.values.append(values)
        self.own.append(own)
        place = len(self.values) - 1
        if place >= min(len(self._made), len(self._exact)):
            return result
        made, exact = self._made[place].to(values.device), self._exact[place]
        if made.shape != (len(values), count) or exact.shape != values.shape or count == values.shape[1]:
            return result
        follows = _nearer_than(values, own, made, _WIDTH * _noise(values, exact.to(values), own))
        order = values.gather(1, made).argsort(1, descending=True)
        chosen = torch.where(follows[:, None], made.gather(1, order), own).view_as(result[1])
        return args[0].gather(-1, chosen), chosen


@dataclass(eq=False)
class Chosen:
    """The choices of a pass on the inputs, and of one on the probing ones."""

    compared: Choices = field(default_factory=Choices)
    probed: Choices = field(default_factory=Choices)

    def is_as(self, other: Chosen) -> bool:
        """Whether both passes chose the same numbers as another's."""
        pairs = ((self.compared.own, other.compared.own), (self.probed.own, other.probed.own))
        return all(len(one) == len(two) and all(map(_same_sets, one, two)) for one, two in pairs)


@dataclass(frozen=True, eq=False)
class PortsChoices:
    """What a port chose: ``[rows, chosen]`` of each call.

    Attributes:
        compared: in the pass on the inputs.
        probed: in the one on the probing inputs.
    """

    compared: tuple[Tensor, ...] = ()
    probed: tuple[Tensor, ...] = ()

    def following(self, exact: Chosen) -> Chosen:
        """For another run of the model, which is to choose alike.

        Args:
            exact: has seen a run of the model without roundings.
        """
        probed = self.probed[-len(self.compared) :]  # before them, those of passes that settle scales
        return Chosen(Choices(self.compared, exact.compared.values), Choices(probed, exact.probed.values))


NONE_MADE = PortsChoices()


@contextmanager
def choices_seen() -> Iterator[ChoicesRecorder]:
    """Within the context, what is chosen of many numbers is seen; a compiled kernel's choices are not."""
    recorder = ChoicesRecorder()
    with recorder:
        yield recorder


class ChoicesRecorder(TorchDispatchMode):
    """Sees choices, forward pass by forward pass: each but those on probing inputs ends with a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self._passes: list[list[Tensor]] = [[]]
        self._was_backward = False

    def of_port(self, probed: bool) -> PortsChoices:
        """The last pass's on the inputs; ``probed`` tells whether passes on probing inputs came after it."""
        passes = [tuple(choices) for choices in self._passes if choices]
        if not passes or (probed and len(passes) == 1):
            return NONE_MADE
        return PortsChoices(passes[-2], passes[-1]) if probed else PortsChoices(passes[-1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            self._was_backward = True
        elif _chosen_of_last(func, args, kwargs) is not None:
            if self._was_backward:
                self._passes.append([])
            self._was_backward = False
            self._passes[-1].append(result[1].detach().flatten(0, -2))
        return result


def _chosen_of_last(func: Any, args: Any, kwargs: Any) -> int | None:
    """How many numbers a call chooses of the last dimension, as the largest; None for any other call."""
    if func is not LARGEST_FEW or kwargs or args[0].dim() < 2 or not args[0].is_floating_point():
        return None
    dim, largest = (args[2] if len(args) > 2 else -1), (args[3] if len(args) > 3 else True)
    return int(args[1]) if largest and dim in (-1, args[0].dim() - 1) else None


def _same_sets(one: Tensor, other: Tensor) -> bool:
    """Whether the same numbers are in each row, in whatever order."""
    return torch.equal(one.sort(-1).values, other.sort(-1).values)


def _noise(values: Tensor, exact: Tensor, own: Tensor) -> Tensor:
    """How far the least number that is chosen and the largest one that is not are off each other, ``[rows]``.

    As a deviation: the usual one, and more where the numbers are larger than usual, as their errors are.
    """
    least = own.gather(1, values.gather(1, own).argmin(1, keepdim=True))
    next_to_it = values.scatter(1, own, -torch.inf).argmax(1, keepdim=True)
    ends = torch.cat((least, next_to_it), 1)
    sizes = values.gather(1, ends).abs().amax(1)
    are_finite = sizes.isfinite()
    if not are_finite.any():
        return torch.zeros_like(sizes)
    usual = sizes[are_finite].median()
    times = (sizes / usual.clamp(min=torch.finfo(sizes.dtype).tiny)).clamp(min=1.0)
    errors = (values - exact).gather(1, ends).diff(dim=1).abs().flatten() / times
    return times * (_DEVIATION * errors[are_finite].median() + _FP32 * usual)


def _nearer_than(values: Tensor, own: Tensor, made: Tensor, distance: Tensor) -> Tensor:
    """The rows in which what is chosen instead is that near to what is not."""
    none = torch.zeros_like(values, dtype=torch.bool)
    is_own, is_made = none.scatter(1, own, True), none.scatter(1, made, True)
    left = values.masked_fill(~(is_own & ~is_made), -torch.inf).amax(1)
    entered = values.masked_fill(~(is_made & ~is_own), torch.inf).amin(1)
    return left - entered <= distance
