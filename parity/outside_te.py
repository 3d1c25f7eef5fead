"""Which of a port's parameters lie outside of TransformerEngine's modules, as a router's or a head's often do.

PyTorch's own layers multiply in the dtype that they hold: no autocast of TE's makes FP8 of them, nor do they read FP32
in TF32 unless they are told to.
"""

from __future__ import annotations

from torch import nn

from parity.case import Pair
from parity.weights import names

_TE = "transformer_engine"


def parameters_outside_te(pair: Pair) -> frozenset[str]:
    """Names of the reference's parameters that the candidate holds in no module of TE's, nor in one derived from these.

    A parameter that is tied to one of TE's, as a head's to an embedding's, is within.
    """
    modules = filter(_is_te, pair.candidate.modules())
    within = {id(parameter) for module in modules for parameter in module.parameters()}
    parameters = dict(pair.candidate.named_parameters())
    inside = {
        name
        for left, right in pair.weights.items()
        if any(id(parameters[parameter]) in within for parameter in names(right))
        for name in names(left)
    }
    return frozenset(name for left in pair.weights for name in names(left)) - inside


def _is_te(module: nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == _TE for base in type(module).__mro__)
