"""A way to get one operation of the reference wrong, tried at all places where it occurs and at each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import nn

from parity.diagnosis.hypothesis import Hypothesis, Scope
from parity.watching.trace import Edit

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
    kinds: Callable[[Operation], Sequence[str]] = lambda operation: (),
    where: str = "",
) -> Iterator[Hypothesis]:
    """Each mistake made with all operations at once, with those of each kind, and with each alone if they are few.

    Args:
        mistakes: to make.
        operations: those of one sort in the reference.
        module: the reference.
        place: of an operation, for names and messages; None to try all at once only.
        kinds: of an operation, for names and messages, where one argument of TE is for some of them.
        where: the operations are, for names and messages; empty where they are all of their sort.
    """
    for mistake in mistakes:
        changed = [operation for operation in operations if mistake.edits(operation)]
        if not changed:
            continue
        yield _made(mistake, operations, module, where=where)
        for name, some in _by_kind(changed, kinds).items():
            yield _made(mistake, some, module, "kind", f" in {name}")
        if place is not None and 1 < len(changed) <= MOST_PLACES:
            for operation in changed:
                yield _made(mistake, [operation], module, "one", place=place(operation))


def _by_kind(
    operations: Sequence[Operation], kinds: Callable[[Operation], Sequence[str]]
) -> dict[str, list[Operation]]:
    """Some of the operations, more than one, by their kind; kinds that are of the same ones are one."""
    by_kind: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        for kind in kinds(operation):
            by_kind[kind].append(operation)
    found: dict[tuple[int, ...], str] = {}
    for name, some in by_kind.items():
        if 1 < len(some) < len(operations):
            found.setdefault(tuple(map(id, some)), name)
    return {name: by_kind[name] for name in found.values()}


def _made(
    mistake: Mistake[Operation],
    operations: Sequence[Operation],
    module: nn.Module,
    scope: Scope = "all",
    where: str = "",
    place: str = "",
) -> Hypothesis:
    family = mistake.tuned
    where = f" in {place}" if place else where
    return Hypothesis(
        mistake.title,
        mistake.name + where,
        mistake.repair + where,
        module,
        tuple(edit for operation in operations for edit in mistake.edits(operation)),
        subtle=mistake.subtle,
        value=mistake.value,
        tuned=None if family is None else lambda value: _made(family(value), operations, module, scope, where, place),
        scope=scope,
        place=place,
        family=(mistake.name, mistake.repair) if place else ("", ""),
    )
