"""What names of a module mean to a weight map: parameters, further names of tied ones, buffers, LayerNorms' weights."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from torch import nn

from parity.weights.terms import Shape


@dataclass(frozen=True)
class OtherNames:
    """Names of a module.

    Attributes:
        tied: further names of tied parameters, each with the first, which alone ``module.named_parameters()`` gives.
        buffers: no map may name them.
        layer_norms: weights of PyTorch's LayerNorm, which has no bias where it was built without one.
    """

    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: Set[str] = frozenset()
    layer_norms: Set[str] = frozenset()


@dataclass(frozen=True)
class Parameters:
    """What a map may name of one module.

    Attributes:
        kind: ``reference`` or ``TE``.
        shapes: of its parameters, by name.
        others: what further names mean.
    """

    kind: str
    shapes: Mapping[str, Shape]
    others: OtherNames = field(default_factory=OtherNames)


def other_names(module: nn.Module) -> OtherNames:
    """The names of a module that are no parameters' own, and those of its LayerNorms."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return OtherNames(
        tied={name: first[id(parameter)] for name, parameter in every if name != first[id(parameter)]},
        buffers=frozenset(name for name, _ in module.named_buffers(remove_duplicate=False)),
        layer_norms=frozenset(
            f"{path}.weight" if path else "weight"
            for path, part in module.named_modules()
            if isinstance(part, nn.LayerNorm)
        ),
    )
