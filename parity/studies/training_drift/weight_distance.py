"""How far apart the weights of two models are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Distance:
    """Of one set of numbers from another.

    Attributes:
        maximum: the largest difference of a number from its counterpart.
        wasserstein: Wasserstein-1 distance of the two sets, which asks how far the numbers must move to become the
            others as a whole, whichever becomes which: 0 where two numbers have merely changed places.
    """

    maximum: float
    wasserstein: float


@dataclass(frozen=True)
class WeightDistance:
    """Of one model's weights from another's.

    Attributes:
        whole: of all weights as one set.
        tensors: of each parameter, by name.
    """

    whole: Distance
    tensors: Mapping[str, Distance]


def between(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> WeightDistance:
    """The distance of two models with the same parameters.

    Raises:
        ValueError: if a parameter has another size.
    """
    tensors = {name: _distance(one[name], other[name]) for name in one}
    whole = (torch.cat([model[name].flatten() for name in one]) for model in (one, other))
    return WeightDistance(_distance(*whole), tensors)


def wasserstein(one: Tensor, other: Tensor) -> float:
    """The Wasserstein-1 distance of two sets of equally many numbers.

    The best transport on a line keeps the order, so it is the mean distance between the two in ascending order (Peyré
    and Cuturi, "Computational Optimal Transport", 2019, remark 2.28).

    Args:
        one: any shape.
        other: with as many elements.

    Raises:
        ValueError: if the sizes differ.
    """
    if one.numel() != other.numel():
        raise ValueError(f"{one.numel()} numbers cannot be matched with {other.numel()}")
    ascending = [x.flatten().double().sort().values for x in (one, other)]
    return (ascending[0] - ascending[1]).abs().mean().item()


def _distance(one: Tensor, other: Tensor) -> Distance:
    return Distance((one.double() - other.double()).abs().max().item(), wasserstein(one, other))
