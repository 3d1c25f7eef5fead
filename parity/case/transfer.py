"""Carry weights and gradients from one layout to the other by a weight map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parity.case.weight_map import Copies, Shape, Side, WeightMap, holds, linear_part, names, pack, unpack

# Moving by a weight map: parameters to TE's layout and back, and gradients by the same map.


def parameter_shapes(module: nn.Module) -> dict[str, Shape]:
    """Return the shapes of a module's parameters, by name."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def to_candidate(
    weights: WeightMap, reference_tensors: Mapping[str, Tensor], candidate_shapes: Mapping[str, Shape]
) -> dict[str, Tensor]:
    """Return TE's parameters, computed from the reference's.

    They are exact unless the map shifts. Results have the arguments' dtype and device and may share their memory.

    Args:
        weights: a map that ``check_map`` accepts.
        reference_tensors: the reference's parameters, all of one dtype.
        candidate_shapes: the shapes of TE's parameters.
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
    """Invert ``to_candidate``; constants are dropped, and the first of several copies is taken."""
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
    """Return the gradients with respect to the reference's parameters, from those with respect to TE's.

    A map moves elements and adds numbers. Gradients move in the same way, added numbers have none, and the gradients of
    copies add up. An entry is left out if none of its TE parameters has a gradient.

    Raises:
        KeyError: if only some of an entry's parameters have one.
    """
    linear = {left: right for left, right in _take_linear_parts(weights).items() if _any_in(right, candidate_gradients)}
    return to_reference(linear, candidate_gradients, reference_shapes)


def gradients_to_candidate(
    weights: WeightMap, gradients: Mapping[str, Tensor], candidate_shapes: Mapping[str, Shape]
) -> dict[str, Tensor]:
    """Invert ``gradients_to_reference``, except that each copy gets the gradient of all copies together.

    An entry is left out if one of its reference's parameters has no gradient.
    """
    linear = {
        left: right
        for left, right in _take_linear_parts(weights).items()
        if all(name in gradients for name in names(left))
    }
    return to_candidate(linear, gradients, candidate_shapes)


def counterparts(
    weights: WeightMap, candidate: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> dict[str, str]:
    """Return which of the reference's buffers each of the candidate's should equal, if that can be told.

    It is the one of the same name; else that of the module whose parameters the map gives to the candidate's module;
    else the only one of the same shape, if the candidate's is also the only one.

    Args:
        weights: the map, which covers only parameters.
        candidate: the candidate's buffers, by name.
        reference: the reference's buffers, by name.
    """
    of_module: dict[str, set[str]] = {}
    for left, right in weights.items():
        for own in map(_find_module_path, names(right)):
            of_module.setdefault(own, set()).update(map(_find_module_path, names(left)))
    found = {}
    for name, buffer in candidate.items():
        path, _, last = name.rpartition(".")
        mapped = [f"{one}.{last}".removeprefix(".") for one in of_module.get(path, ())]
        named = [one for one in (name, *(mapped if len(mapped) == 1 else ())) if one in reference]
        alike = [one for one, x in reference.items() if x.shape == buffer.shape]
        is_only_one = sum(x.shape == buffer.shape for x in candidate.values()) == 1 and buffer.numel() > 1
        if named and named[0] in alike:
            found[name] = named[0]
        elif not named and len(alike) == 1 and is_only_one:
            found[name] = alike[0]
    return found


def _take_linear_parts(weights: WeightMap) -> dict[Side, Side]:
    return {linear_part(left): linear_part(right) for left, right in weights.items()}


def _any_in(side: Side, tensors: Mapping[str, Tensor]) -> bool:
    return any(name in tensors for name in names(side))


# Give the reference one norm for each of TE's, if several of TE's modules have a norm that the reference has once.
#
# Parallel attention and MLP may read one norm (GPT-J, Phi, Cohere). TE's layer has two equal norms, and each returns
# its own rounded gradient, while the reference's one norm gets the sum of both: TE rounds more, and part of it cancels.
# The rounding model computes as TE does.


@contextmanager
def separate_norms(reference: nn.Module, weights: WeightMap) -> Iterator[None]:
    """Let one pass of the reference in this context have as many norms as TE has by this map.

    Args:
        reference: its submodules hold the norms and the layers that read them.
        weights: maps a norm that TE has several times to ``copies``.
    """
    with ExitStack() as hooks:
        for norm, others in _find_repeated_norms(weights).items():
            for te_module in others:
                own = _OwnNorm(reference.get_submodule(norm))
                hooks.callback(own.norm.register_forward_hook(own.note).remove)
                for reader in _submodules_in(te_module, weights) - {norm}:
                    module = reference.get_submodule(reader)
                    hooks.callback(module.register_forward_pre_hook(own.read).remove)
        yield


def _find_repeated_norms(weights: WeightMap) -> dict[str, list[str]]:
    """Return the norms that TE has several times, with TE's modules for each, except the first.

    The first one uses the reference's own norm.
    """
    found: dict[str, list[str]] = {}
    for left, right in weights.items():
        if isinstance(left, str) and isinstance(right, Copies):
            _, *others = dict.fromkeys(map(_find_module_path, names(right)))
            found[_find_module_path(left)] = others
    return found


def _submodules_in(te_module: str, weights: WeightMap) -> set[str]:
    """Return the reference's submodules whose parameters only this module of TE holds."""
    return {
        _find_module_path(name)
        for left, right in weights.items()
        if not holds(right, Copies) and all(_find_module_path(parameter) == te_module for parameter in names(right))
        for name in names(left)
    }


def _find_module_path(parameter: str) -> str:
    """Return the module that has a parameter of this name."""
    return parameter.rpartition(".")[0]


class _OwnNorm:
    """A further norm, computed once per pass, so that its readers' gradients add up before its own backward pass."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm
        self._given: tuple[Any, ...] = ()
        self._returned: Tensor | None = None
        self._own: Tensor | None = None

    def note(self, norm: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
        """Note, as a hook of the norm, what it was last given and returned."""
        self._given, self._returned, self._own = given, returned, None

    def read(self, reader: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Pass on, as a hook of a layer, this norm's result in place of the reference's."""
        if self._returned is None or not any(x is self._returned for x in given):
            return given
        if self._own is None:
            self._own = self.norm.forward(*self._given)
        return tuple(self._own if x is self._returned else x for x in given)
