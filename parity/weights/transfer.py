"""What a weight map moves: parameters to TE's layout and back, and gradients by the same map."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from parity.weights.notation import WeightMap
from parity.weights.sides import linear_part, names, pack, unpack
from parity.weights.terms import Shape, Side


def parameter_shapes(module: nn.Module) -> dict[str, Shape]:
    """The shapes of a module's parameters, by name."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def to_candidate(
    weights: WeightMap, reference_tensors: Mapping[str, Tensor], candidate_shapes: Mapping[str, Shape]
) -> dict[str, Tensor]:
    """TE's parameters from the reference's.

    Exact but where the map shifts. Results have the arguments' dtype and device and may share their memory.

    Args:
        weights: a map that ``check.check_map`` accepts.
        reference_tensors: the reference's parameters, all of one dtype.
        candidate_shapes: of TE's parameters.
    """
    like = next(iter(reference_tensors.values()), torch.empty(0))
    return {
        name: tensor
        for left, right in weights.items()
        for name, tensor in unpack(right, pack(left, reference_tensors, like), candidate_shapes).items()
    }


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the module's parameters of these names, in the parameters' dtypes."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def to_reference(
    weights: WeightMap, candidate_tensors: Mapping[str, Tensor], reference_shapes: Mapping[str, Shape]
) -> dict[str, Tensor]:
    """The inverse of ``to_candidate``, but constants are dropped, and of copies the first counts."""
    inverse = ((right, left) for left, right in weights.items())
    like = torch.empty(0)
    return {
        name: tensor
        for right, left in inverse
        for name, tensor in unpack(left, pack(right, candidate_tensors, like), reference_shapes).items()
    }


def gradients_to_reference(
    weights: WeightMap, candidate_gradients: Mapping[str, Tensor], reference_shapes: Mapping[str, Shape]
) -> dict[str, Tensor]:
    """Gradients with respect to the reference's parameters from those with respect to TE's.

    A map moves elements and adds numbers, so gradients move alike and what is added vanishes; those of copies add up.
    An entry none of whose TE parameters has a gradient is left out.

    Raises:
        KeyError: if only some of an entry's parameters have one.
    """
    linear = {left: right for left, right in _linear(weights).items() if _any_in(right, candidate_gradients)}
    return to_reference(linear, candidate_gradients, reference_shapes)


def _linear(weights: WeightMap) -> dict[Side, Side]:
    return {linear_part(left): linear_part(right) for left, right in weights.items()}


def _any_in(side: Side, tensors: Mapping[str, Tensor]) -> bool:
    return any(name in tensors for name in names(side))
