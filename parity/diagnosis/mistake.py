"""A way to get one operation of the reference wrong, tried at all places where it occurs and at each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch import nn

from parity.calls import Edit
from parity.diagnosis.hypothesis import Hypothesis

Operation = TypeVar("Operation")

MOST_PLACES = 8
"""Of an operation that occurs oftener, no single occurrence is tried: ports repeat their mistakes layer by layer."""


@dataclass(frozen=True)
class Mistake(Generic[Operation]):
    """What a port computes in the place of an operation.

    Attributes:
        title, name, repair, subtle: as in ``Hypothesis``.
        edits: to compute that at one place; none where it would compute what is right there.
        value, tuned: as in ``Hypothesis``.
    """

    title: str
    name: str
    repair: str
    edits: Callable[[Operation], Sequence[Edit]]
    subtle: bool = False
    value: float | None = None
    tuned: Callable[[float], Mistake[Operation]] | None = None


def everywhere_and_somewhere(
    mistakes: Iterable[Mistake[Operation]],
    operations: Sequence[Operation],
    module: nn.Module,
    place: Callable[[Operation], str] | None = None,
) -> Iterator[Hypothesis]:
    """Each mistake made with all operations at once, and where there are a few of them with each alone.

    Args:
        mistakes: to make.
        operations: those of one kind in the reference.
        module: the reference.
        place: of an operation, for names and messages; None to try all at once only.
    """
    for mistake in mistakes:
        edits = [tuple(mistake.edits(operation)) for operation in operations]
        changed = [i for i, some in enumerate(edits) if some]
        if not changed:
            continue
        yield _everywhere(mistake, operations, module)
        if place is not None and 1 < len(changed) <= MOST_PLACES:
            for i in changed:
                yield _hypothesis(mistake, module, f" in {place(operations[i])}", edits[i])


def _everywhere(mistake: Mistake[Operation], operations: Sequence[Operation], module: nn.Module) -> Hypothesis:
    edits = tuple(one for operation in operations for one in mistake.edits(operation))
    family = mistake.tuned
    tuned = None if family is None else lambda value: _everywhere(family(value), operations, module)
    return replace(_hypothesis(mistake, module, "", edits), value=mistake.value, tuned=tuned)


def _hypothesis(mistake: Mistake[Operation], module: nn.Module, where: str, edits: tuple[Edit, ...]) -> Hypothesis:
    name, repair = mistake.name + where, mistake.repair + where
    return Hypothesis(
        mistake.title,
        name,
        repair,
        module,
        edits,
        subtle=mistake.subtle,
        everywhere=not where,
    )
