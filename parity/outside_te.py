"""Which of a port's parameters lie outside of TransformerEngine's modules, as a router's or a head's often do.

PyTorch's own layers multiply in the dtype that they hold: no autocast of TE's makes FP8 of them, nor do they read FP32
in TF32 unless they are told to.
"""

from __future__ import annotations

from itertools import accumulate

from torch import nn

from parity.case import Pair
from parity.weights import names

_TE = "transformer_engine"


def parameters_outside_te(pair: Pair) -> frozenset[str]:
    """Names of the reference's parameters that the candidate holds in no module of TE's."""
    modules = dict(pair.candidate.named_modules())
    inside = {
        name
        for left, right in pair.weights.items()
        if any(_is_within_te(modules, parameter) for parameter in names(right))
        for name in names(left)
    }
    return frozenset(name for left in pair.weights for name in names(left)) - inside


def _is_within_te(modules: dict[str, nn.Module], parameter: str) -> bool:
    """Whether the module that holds a parameter is one of TE's, derived from one, or part of one."""
    holder = parameter.rpartition(".")[0].split(".")
    return any(_is_te(modules[path]) for path in ("", *accumulate(holder, "{}.{}".format)) if path in modules)


def _is_te(module: nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == _TE for base in type(module).__mro__)
