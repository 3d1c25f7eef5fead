"""The reference with one norm for each of TE's, where TE's modules each have a norm that the reference has once.

Attention and MLP side by side may read one norm (GPT-J, Phi, Cohere). TE's layer has two that hold the same, and each
returns its own gradient, rounded, where the reference's one norm is given the sum of both: more is rounded, and partly
cancels. The rounding model computes as TE does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from parity.weights.notation import WeightMap
from parity.weights.sides import holds, names
from parity.weights.terms import Copies


@contextmanager
def separate_norms(reference: nn.Module, weights: WeightMap) -> Iterator[None]:
    """Within the context, one pass of the reference has as many norms as TE has by this map.

    Args:
        reference: whose submodules hold the norms and the layers that read them.
        weights: in which a norm that TE has several times is mapped to ``copies``.
    """
    with ExitStack() as hooks:
        for norm, others in _norms(weights).items():
            for te_module in others:
                own = _OwnNorm(reference.get_submodule(norm))
                hooks.callback(own.norm.register_forward_hook(own.note).remove)
                for reader in _submodules_in(te_module, weights) - {norm}:
                    module = reference.get_submodule(reader)
                    hooks.callback(module.register_forward_pre_hook(own.read).remove)
        yield


def _norms(weights: WeightMap) -> dict[str, list[str]]:
    """The submodules that TE has several times, each with TE's modules but the first, which reads the reference's."""
    found: dict[str, list[str]] = {}
    for left, right in weights.items():
        if isinstance(left, str) and isinstance(right, Copies):
            _, *others = dict.fromkeys(map(_holder, names(right)))
            found[_holder(left)] = others
    return found


def _submodules_in(te_module: str, weights: WeightMap) -> set[str]:
    """The reference's submodules whose parameters a module of TE holds alone."""
    return {
        _holder(name)
        for left, right in weights.items()
        if not holds(right, Copies) and all(_holder(parameter) == te_module for parameter in names(right))
        for name in names(left)
    }


def _holder(parameter: str) -> str:
    """The module that has a parameter of this name."""
    return parameter.rpartition(".")[0]


class _OwnNorm:
    """Computed once in a pass, so that all of its readers' gradients add up before its own backward pass."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm
        self._given: tuple[Any, ...] = ()
        self._returned: Tensor | None = None
        self._own: Tensor | None = None

    def note(self, norm: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
        """As a hook of the norm: what it was given and returned last."""
        self._given, self._returned, self._own = given, returned, None

    def read(self, reader: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """As a hook of a layer: this norm's result in the place of the reference's."""
        if self._returned is None or not any(x is self._returned for x in given):
            return given
        if self._own is None:
            self._own = self.norm.forward(*self._given)
        return tuple(self._own if x is self._returned else x for x in given)
