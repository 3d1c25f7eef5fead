"""Kinks: where a function's gradient jumps, and rounding decides on which side of the jump a value falls.

A ReLU's gradient is 0 or 1, an absolute value's -1 or 1, a maximum's is one operand's or the other's. A value that is
nearer to the jump than its own error may fall on either side of it in a faithful port. Which values these are depends
on the error that values have there: it is measured, call by call, as the distance between what the rounding model
computes and what FP32 without the precision's roundings does; larger numbers than most have larger errors than most.

PyTorch decides in two ways. Its kernels of gradients read the argument of the function; and where a gradient is made
of several calls, one of them compares numbers or takes their signs. Both read a moved argument here. Where the largest
of many values is taken, the next one is chosen that is as near.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parity.rounding.addresses import address
from parity.rounding.aten_calls import (
    COMPARISONS,
    HARDSWISH_BACKWARD,
    KINKED_BACKWARD,
    LARGEST,
    LARGEST_AND_PLACE,
    RELU_BACKWARD,
    SIGN,
)

# Standard deviations of a value's error within which it may be beyond a kink. Of the values that normal errors take
# across one, a share of 1 in 50 is farther from it than 2, and of 1 in 100,000 than 4 (the integral of the tail).
WIDTH = 4.0
# The kinks of hardswish, whose gradient changes between them as well.
_HARDSWISH = 3.0
# What sums in another order change, at least.
_FP32 = torch.finfo(torch.float32).eps


class Kinks:
    """The values that decide gradients at kinks, in the order of their calls, and where they are moved to.

    Args:
        side: 0 to leave them where they are; 1 to move each up by as much as it may be wrong, -1 down.
        exact: the values, as a pass without the precision's roundings has them.
    """

    def __init__(self, side: float = 0.0, exact: Sequence[Tensor] = ()) -> None:
        self.values: list[Tensor] = []
        self._side = side
        self._exact = exact
        self._arguments: dict[int, Tensor] = {}  # of ReLUs, by their results' address

    def see(self, argument: Tensor, result: Tensor) -> None:
        """Take note of a ReLU's argument and result: its gradient's kernel reads the result alone."""
        self._arguments[address(result)] = argument

    def moved(self, func: Any, args: Any) -> Any:
        """The arguments of a call, with the value moved that decides on which side of a kink it is, if one does."""
        place = KINKED_BACKWARD.get(func)
        if place is not None:
            value = args[place]
            if func is RELU_BACKWARD:
                value = self._arguments.get(address(value), value)
            return *args[:place], self._beside(value, only_across=func is HARDSWISH_BACKWARD), *args[place + 1 :]
        if _takes_largest(func, args) and not self._side:
            self._beside(args[0])
        if func in SIGN:
            return self._beside(args[0]), *args[1:]
        if func in COMPARISONS and args[0].is_floating_point():
            difference = self._beside(args[0] - args[1], of=args[0])
            return difference, torch.zeros_like(difference) if isinstance(args[1], Tensor) else 0.0
        return args

    def chosen(self, func: Any, args: Any) -> Any:
        """What a largest value's call returns, with the next to it chosen where it is as near; None of other calls.

        A largest value's gradient goes to where it is: the winner's argument, and no other, is lowered.
        """
        if not self._side or not _takes_largest(func, args):
            return None
        x, dim, keep = args[0], _dimensions(args)[0], len(args) > 2 and args[2]
        winner = x.detach().argmax(dim, keepdim=True)
        step = self._beside(x, of=x) - x.detach()
        lowered = x.detach().scatter_add(dim, winner, -step.abs().gather(dim, winner))
        place = lowered.argmax(dim, keepdim=True)
        values = x.gather(dim, place)
        if not keep:
            values, place = values.squeeze(dim), place.squeeze(dim)
        return values if func is LARGEST else (values, place)

    def _beside(self, value: Tensor, only_across: bool = False, of: Tensor | None = None) -> Tensor:
        """The value, moved by as much as it may be wrong; by more where it is made ``of`` large numbers."""
        value = value.detach()
        self.values.append(value)
        place = len(self.values) - 1
        if not self._side or place >= len(self._exact) or self._exact[place].shape != value.shape:
            return value
        noise = _root_mean_square(value - self._exact[place]) + _FP32 * _root_mean_square(value)
        if of is not None:  # what floating point loses of a number grows with it
            usual = _root_mean_square(of.detach()).clamp(min=torch.finfo(of.dtype).tiny)
            noise = noise * (of.detach().abs() / usual).clamp(min=1.0)
        moved = value + self._side * WIDTH * noise
        if not only_across:
            return moved
        return torch.where((value.abs() < _HARDSWISH) != (moved.abs() < _HARDSWISH), moved, value)


def _takes_largest(func: Any, args: Any) -> bool:
    """Whether a call returns the largest of numbers along one dimension."""
    return func in (LARGEST, LARGEST_AND_PLACE) and args[0].is_floating_point() and len(_dimensions(args)) == 1


def _dimensions(args: Any) -> list[int]:
    dims = args[1] if len(args) > 1 else ()
    return [dims] if isinstance(dims, int) else list(dims)


def _root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
