"""A hypothesis: a known mistake of ports, as a change under which the reference computes what such a port would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor, nn

from parity.diagnosis.calls import Edit, edited

ReadWeights = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Hypothesis:
    """What might be wrong with a port.

    Attributes:
        code: of the finding, see ``docs/findings.md``.
        title: of the finding.
        name: which one of this kind, short and the same in every run, e.g. ``norm eps=1e-06``.
        repair: what to change in the user's code, as the end of a sentence that says how the error falls.
        module: the reference.
        edits: what it would have to compute otherwise.
        read: which of its parameters would be others, from TE's by name; None where all are as they are.
        subtle: whether the computed function changes by little, so that a norm of the error may not show it.
        everywhere: whether the mistake is made with all operations of its kind, or with one of several.
    """

    code: str
    title: str
    name: str
    repair: str
    module: nn.Module = field(repr=False)
    edits: tuple[Edit, ...] = field(default=(), repr=False)
    read: ReadWeights | None = field(default=None, repr=False)
    subtle: bool = False
    everywhere: bool = True

    def context(self) -> AbstractContextManager[None]:
        """One forward pass of the reference inside, gradients included, computes what the hypothesis says.

        Parameters stay as they are; ``read`` is for the caller. The module raises ``Misfit`` if it calls something else
        than it did when it was traced.
        """
        return edited(self.module, self.edits)
