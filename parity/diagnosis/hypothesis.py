"""A hypothesis: a known mistake of ports, as a change under which the reference computes what such a port would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from parity.calls import Edit, edited

Call = Callable[..., Any]
ReadWeights = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
Scope = Literal["all", "kind", "one", "call"]


@dataclass(frozen=True)
class Hypothesis:
    """What might be wrong with a port.

    Attributes:
        title: of the finding, a key of ``parity.diagnosis.codes.CODES``.
        name: which one of this kind, short and the same in every run, e.g. ``norm eps=1e-06``.
        repair: what to change in the user's code, as the end of a sentence that says how the error falls.
        module: the reference.
        edits: what it would have to compute otherwise.
        read: from its parameters to those that would be others, by name; None where all are as they are.
        around: from how it is called, ``call(module, *inputs)``, to how it would be; None for as it is.
        subtle: whether the computed function changes by little, so that a norm of the error may not show it.
        value: of the constant that the mistake is about, where it is about one; positive.
        tuned: the same mistake with another value.
        scope: whether the mistake is made with all operations that it could be made with, with those of one kind, with
            one of several, or with a call that no subject knows.
    """

    title: str
    name: str
    repair: str
    module: nn.Module = field(repr=False)
    edits: tuple[Edit, ...] = field(default=(), repr=False)
    read: ReadWeights | None = field(default=None, repr=False)
    around: Callable[[Call], Call] | None = field(default=None, repr=False)
    subtle: bool = False
    value: float | None = None
    tuned: Callable[[float], Hypothesis] | None = field(default=None, repr=False)
    scope: Scope = "all"

    def context(self) -> AbstractContextManager[None]:
        """One forward pass of the reference inside, gradients included, computes what the hypothesis says.

        ``read`` and ``around`` are left to ``parity.diagnosis.trial``. The module raises ``Misfit`` if it calls
        something else than it did when it was traced.
        """
        return edited(self.module, self.edits)
