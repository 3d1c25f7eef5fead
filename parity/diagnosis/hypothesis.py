"""A hypothesis: a known mistake of ports, as a change under which the reference computes what such a port would."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn

from parity.watching.calls import edited
from parity.watching.trace import Edit

ModuleCall = Callable[..., Any]
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
            one of several, or tried last: with a call that no subject knows, or as hardly anybody makes it.
        place: of the one of several; empty where it is made with more. What is made elsewhere too has the same
            ``family``.
        family: what is wrong and what to change, wherever it is; empty where the mistake is made at no single place.
    """

    title: str
    name: str
    repair: str
    module: nn.Module = field(repr=False)
    edits: tuple[Edit, ...] = field(default=(), repr=False)
    read: ReadWeights | None = field(default=None, repr=False)
    around: Callable[[ModuleCall], ModuleCall] | None = field(default=None, repr=False)
    subtle: bool = False
    value: float | None = None
    tuned: Callable[[float], Hypothesis] | None = field(default=None, repr=False)
    scope: Scope = "all"
    place: str = ""
    family: tuple[str, str] = ("", "")

    def context(self) -> AbstractContextManager[None]:
        """One forward pass of the reference inside, gradients included, computes what the hypothesis says.

        ``read`` and ``around`` are left to ``parity.diagnosis.trial``. The module raises ``Misfit`` if it calls
        something else than it did when it was traced.
        """
        return edited(self.module, self.edits)


def at_places(same: Sequence[Hypothesis]) -> Hypothesis:
    """One mistake that is made at several places, from what it is at each; of one family."""
    first = same[0]
    name, repair = first.family
    places = ", ".join(sorted((one.place for one in same), key=_by_numbers))
    tuned = [one.tuned for one in same]

    def with_another(value: float) -> Hypothesis:
        return at_places([family(value) for family in tuned if family is not None])

    return replace(
        first,
        name=f"{name} in {places}",
        repair=f"{repair} in {places}",
        edits=tuple(edit for one in same for edit in one.edits),
        tuned=with_another if all(tuned) else None,
        place=places,
    )


def _by_numbers(place: str) -> list[tuple[str, int]]:
    """A key that puts ``layers.10`` after ``layers.9``."""
    return [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", place)]
