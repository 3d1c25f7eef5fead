"""Which of a port's parameters lie outside of TransformerEngine's modules, as a router's or a head's often do.

PyTorch's own layers multiply in the dtype that they hold: no autocast of TE's makes FP8 of them, nor do they read FP32
in TF32 unless they are told to.
"""

from __future__ import annotations

from torch import nn

from parity.case import Pair
from parity.watching.whose import is_of_te
from parity.weights.sides import names


def parameters_outside_te(pair: Pair) -> frozenset[str]:
    """Names of the reference's parameters that the candidate holds in no module of TE's, nor in one derived from these.

    A parameter that is tied to one of TE's, as a head's to an embedding's, is within.
    """
    within = {id(parameter) for module in of_te(pair.candidate).values() for parameter in module.parameters()}
    parameters = dict(pair.candidate.named_parameters())
    inside = {
        name
        for left, right in pair.weights.items()
        if any(id(parameters[parameter]) in within for parameter in names(right))
        for name in names(left)
    }
    return frozenset(name for left in pair.weights for name in names(left)) - inside


def of_te(module: nn.Module) -> dict[str, nn.Module]:
    """The module itself and those in it that are TE's, or derived from these, by their names in it."""
    return {name: part for name, part in module.named_modules() if _is_te(part)}


def has_te(module: nn.Module) -> bool:
    """Whether there is one."""
    return bool(of_te(module))


def _is_te(module: nn.Module) -> bool:
    return any(is_of_te(base) for base in type(module).__mro__)
