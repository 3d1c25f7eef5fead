"""Which tensors of a pass are a norm's: its reciprocal root, and its result before and after weight and bias."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parity.rounding.addresses import address, addresses
from parity.rounding.aten_calls import AFFINE, LAYER_NORM, RECIPROCAL_ROOT


class NormsSeen:
    """The norms of a pass; their tensors are kept, so that no address is given out again."""

    def __init__(self) -> None:
        self._roots: dict[int, Tensor] = {}
        self._normalized: dict[int, Tensor] = {}

    def see(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Whether the result is a reciprocal root, is scaled by one, or is a norm's with its weight or bias applied."""
        if func is RECIPROCAL_ROOT:
            self._roots[address(result)] = result
        elif func is LAYER_NORM:
            self._normalized[address(result[0])] = result[0]
        elif func in AFFINE:
            operands = addresses(args)
            by_parameter = any(isinstance(x, Tensor) and x.dim() == 1 for x in args)
            if operands & self._roots.keys() or (by_parameter and operands & self._normalized.keys()):
                self._normalized[address(result)] = result

    def see_gradient(self, args: tuple[Any, ...], result: Any) -> None:
        """Of a step in the backward pass: what has a number for each root is a root's gradient, and steps read it."""
        numbers = {self._roots[place].numel() for place in addresses(args) & self._roots.keys()}
        if isinstance(result, Tensor) and result.numel() in numbers:
            self._roots[address(result)] = result

    def is_result(self, x: Tensor) -> bool:
        """Whether a norm returned the tensor."""
        return address(x) in self._normalized

    def is_step(self, args: tuple[Any, ...]) -> bool:
        """Whether a call with these arguments is a step of a norm, which no port of TE computes by itself."""
        return bool(addresses(args) & self._roots.keys())
