"""Which tensors of a forward pass are made of weights alone, and which are activations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from parity.rounding.addresses import address
from parity.rounding.aten_calls import ELEMENTWISE, EMBEDDING


class Lineage:
    """Tells products of two activations, such as similarities of embeddings, from linear layers.

    A linear layer's weight may be computed: joined of several, scaled, or a sum with the product of two small ones.

    Args:
        weights: the model's parameters.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._of_weights = {address(weight): weight for weight in weights}  # kept: no address is given out again
        # By address: what was multiplied by weights, and the sizes of these. A module that takes a step of training in
        # its forward pass multiplies it by a gradient as well, which gives the gradient of such a weight.
        self._read: dict[int, tuple[Tensor, set[frozenset[int]]]] = {}
        self._products: dict[int, set[tuple[int, int]]] = defaultdict(set)  # shapes of results, by operands' addresses

    def see(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Take note of a call of the forward pass: what is computed of weights and constants alone is a weight.

        So is what adds anything to a matrix of weights, as a step of an optimizer does.
        """
        if func is EMBEDDING or not self._of_weights:  # the inputs choose an embedding's rows
            return
        operands = list(_floating(args))
        weights = [x for x in operands if address(x) in self._of_weights]
        if not weights:
            return
        results = list(_floating((result,)))
        is_of_them_alone = all(not x.requires_grad or address(x) in self._of_weights for x in operands)
        is_added = func in ELEMENTWISE and any(x.dim() > 1 and x.shape == results[0].shape for x in weights)
        if is_of_them_alone or is_added:
            self._of_weights.update((address(x), x) for x in results)

    def is_weight(self, x: Tensor) -> bool:
        """Whether it was computed of weights."""
        return address(x) in self._of_weights

    def is_product_of_activations(self, left: Tensor, right: Tensor) -> bool:
        """Whether a product of the forward pass has no weight, nor is the gradient of one; it is remembered."""
        for operand, other in ((left, right), (right, left)):
            if address(operand) in self._of_weights:
                self._read.setdefault(address(other), (other, set()))[1].add(frozenset(_shape(operand)))
                return False
        result = left.shape[-2], right.shape[-1]
        if any(frozenset(result) in self._read[address(x)][1] for x in (left, right) if address(x) in self._read):
            return False
        for operand in (left, right):
            self._products[address(operand)].add(result)
        return True

    def is_gradient_of_product(self, left: Tensor, right: Tensor) -> bool:
        """Whether a product of the backward pass is a gradient of such a product.

        The gradients of ``L @ R`` are ``g @ R.T`` and ``L.T @ g``, with g of the result's shape.
        """
        of_right, of_left = (self._products.get(address(x), ()) for x in (right, left))
        return _shape(left) in of_right or _shape(right) in of_left


def _shape(x: Tensor) -> tuple[int, int]:
    return x.shape[-2], x.shape[-1]


def _floating(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _floating(value)
