"""Biases that a port adds by itself, as where TE hands them out (``return_bias``): the product is stored before."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parity.rounding.addresses import address
from parity.rounding.freedom import Freedom
from parity.rounding.storing import Storing

ADDED_BIAS = "bias"
"""Stands among the names of functions that a port calls for a bias that it adds to a layer's result."""

ADDED_TO_SUM = "bias of a sum"
"""Ditto for one that it adds after the residual connection, to ``x + layer(x)``."""


def added_bias(name: str, operands: tuple[Any, ...]) -> set[str]:
    """Which of the above a call of an ATen function is; empty if none."""
    if name not in ("add", "add_") or not all(isinstance(x, Tensor) for x in operands[:2]):
        return set()
    some, other = sorted(operands[:2], key=lambda x: x.dim())
    if not some.dim() == 1 < other.dim() or not some.requires_grad or some.shape[0] != other.shape[-1]:
        return set()
    is_of_sum = type(other.grad_fn).__name__ == "AddBackward0"
    return {ADDED_BIAS, ADDED_TO_SUM} if is_of_sum else {ADDED_BIAS}


class BiasesByHand:
    """The linear layers of a pass, as a port rounds them that adds their biases by itself.

    Args:
        storing: how the pass stores tensors.
        freedom: whose ``plain`` says whether the port does.
    """

    def __init__(self, storing: Storing, freedom: Freedom) -> None:
        self._storing = storing
        self.made = ADDED_BIAS in freedom.plain
        self._to_sums = ADDED_TO_SUM in freedom.plain
        self._parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # results are kept, so that no address comes again

    def result(self, product: Tensor, bias: Tensor) -> Tensor:
        """A linear layer's result, ``[rows, out]``."""
        product = self._storing.store(product)
        result = self._storing.store(product + bias)
        if self._to_sums:
            self._parts[address(result)] = product, bias, result
        return result

    def in_sum(self, left: Tensor, right: Tensor) -> Tensor | None:
        """The sum of two activations, to which a bias of one of them is added last; None where none has one."""
        for one, other in ((left, right), (right, left)):
            parts = self._parts.get(address(one))
            if parts is not None and parts[0].numel() == one.numel():
                product, bias, _ = parts
                return self._storing.store(self._storing.store(other + product.view_as(one)) + bias)
        return None
