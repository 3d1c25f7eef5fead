"""A mistake of a port: a change to what the reference computes, and where it may have been made."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from parity.result import NO_CODE, Code
from parity.trace.calls import Misfit
from parity.trace.trace import Edit, ordinal

# A hypothesis is a known mistake of ports: a change that makes the reference compute what such a port would.


ModuleCall = Callable[..., Any]
Around = Callable[[ModuleCall], ModuleCall]
ReadWeights = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
Scope = Literal["all", "kind", "one", "call"]


@dataclass(frozen=True)
class Hypothesis:
    """One thing that might be wrong with a port. ``parity.mistakes.replay`` computes the reference with this mistake.

    Attributes:
        title: the finding's title, a key of ``parity.mistakes.codes.CODES``.
        name: names the mistake among those of this title, short and the same in every run, e.g. ``norm eps=1e-06``.
        repair: what to change in the user's code; it ends a sentence that says how far the error falls.
        edits: what changes in the reference's computation.
        read: maps the reference's parameters to those that change, by name; None if all stay as they are.
        around: wraps the function that calls the reference, ``call(module, *inputs)``; None leaves it as it is.
        returned: maps each floating-point tensor that the reference returns to the port's; None if all stay.
        subtle: whether the computed function changes so little that the norm of the error may not show it.
        value: the positive constant that the mistake is about, if it is about one.
        tuned: makes the same mistake with another value.
        scope: where the mistake is made: with ``all`` operations it applies to, with those of one ``kind``, or with
            ``one`` of several. Those of scope ``call`` are tried last: they are about calls that no recogniser matched,
            or they are very rare.
        place: the one place of several where it is made; empty if it is made at more. The same mistake at another
            place has the same ``family``.
        family: name and repair without the place; empty if the mistake is not about a single place.
        code: the lines of the user's code that the repair changes, if they are known.
        adds: whether the port has a bound (a cap, a window, a score of hidden keys) that the reference has not. A run
            in which nothing reaches it cannot show that.
    """

    title: str
    name: str
    repair: str
    edits: tuple[Edit, ...] = field(default=(), repr=False)
    read: ReadWeights | None = field(default=None, repr=False)
    around: Around | None = field(default=None, repr=False)
    returned: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    subtle: bool = False
    value: float | None = None
    tuned: Callable[[float], Hypothesis] | None = field(default=None, repr=False)
    scope: Scope = "all"
    place: str = ""
    family: tuple[str, str] = ("", "")
    code: Code = NO_CODE
    adds: bool = False


def within(context: Callable[[nn.Module], AbstractContextManager[object]]) -> Around:
    """Return a wrapper that calls the reference inside a context."""

    def around(call: ModuleCall) -> ModuleCall:
        def under(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with context(module):
                return call(module, *args, **kwargs)

        return under

    return around


def on_tensors(given: Callable[[Tensor], Tensor], returned: Callable[[Tensor], Tensor]) -> Around:
    """Return a wrapper that changes every tensor passed to the reference and every tensor it returns."""

    def around(call: ModuleCall) -> ModuleCall:
        def under(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map_only(Tensor, given, (args, kwargs))
            return tree_map_only(Tensor, returned, call(module, *args, **kwargs))

        return under

    return around


def at_places(same: Sequence[Hypothesis]) -> Hypothesis:
    """Return one hypothesis for the same mistake at several places, all of one family."""
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


def in_part(one: Edit, dim: int, indices: Collection[int], count: int | None = None) -> Edit:
    """Return the edit restricted to some indices of a dimension of what its call returns.

    Args:
        one: the edit.
        dim: the dimension, from 0.
        indices: where to make the edit, out of ``count``; each stands for an equal share of the dimension.
        count: None for the dimension's own size.
    """

    def compute(was: Any, *values: Tensor) -> Any:
        return tree_map(partial(_replaced, dim, indices, count), was, one.compute(was, *values))

    return replace(one, compute=compute, of=None)


def read_in_part(read: ReadWeights, parts: Mapping[str, tuple[int | None, Collection[int], int | None]]) -> ReadWeights:
    """Return a reading of weights that makes a mistake only in parts of some parameters.

    Args:
        read: makes the mistake everywhere.
        parts: by a parameter's name, the arguments of ``in_part`` after the first; dimension None for all of it.
    """

    def in_parts(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        others = ((name, other) for name, other in read(parameters).items() if name in parts)
        return {name: _replaced(*parts[name], parameters[name], other) for name, other in others}

    return in_parts


def _replaced(dim: int | None, indices: Collection[int], count: int | None, was: Any, other: Any) -> Any:
    """Return ``was`` with these indices of a dimension taken from ``other``."""
    if dim is None or not isinstance(was, Tensor):
        return other
    size = was.shape[dim]
    each, rest = divmod(size, count or size)
    if rest or not each:
        raise Misfit(f"{size} indices in the place of {count}")
    inside = torch.tensor([index // each in indices for index in range(size)], device=was.device)
    return torch.where(inside.view(-1, *[1] * (was.dim() - dim - 1)), other, was)


def _by_numbers(place: str) -> list[tuple[str, int]]:
    """Return a key that puts ``layers.10`` after ``layers.9``."""
    return [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", place)]


_BEYOND = 0.9  # the share of values that a bound does not hide


def to_be_bounded(x: Tensor, bound: float) -> Tensor:
    """Return ``x``, which a mistake clamps or caps.

    Raises:
        Misfit: if nearly all of it is beyond the bound, which then hides whatever is there, right or wrong.
    """
    if (x.detach().abs() > bound).double().mean() > _BEYOND:
        raise Misfit(f"nearly all values are beyond {bound:g}")
    return x


# A mistake in one operation of the reference, tried at all places where the operation occurs and at each one alone.


Operation = TypeVar("Operation")
_Changed = TypeVar("_Changed", contravariant=True)

MOST_PLACES = 16
"""If an operation occurs more often, single occurrences are not tried: ports repeat their mistakes in every layer."""


@dataclass(frozen=True)
class Mistake(Generic[_Changed]):
    """What a port computes in place of an operation.

    Attributes:
        title, name, repair, subtle: as in ``Hypothesis``.
        edits: returns the edits that make the mistake at one place; empty if they would change nothing there.
        value, tuned, code, adds: as in ``Hypothesis``.
    """

    title: str
    name: str
    repair: str
    edits: Callable[[_Changed], Sequence[Edit]]
    subtle: bool = False
    value: float | None = None
    tuned: Callable[[float], Mistake[_Changed]] | None = None
    code: Code = NO_CODE
    adds: bool = False


Row = tuple[str, Callable[[_Changed], Sequence[Edit]]]
"""The repair and the edits of a mistake: one row of a table by name."""


def titled(title: str, rows: Mapping[str, Row[Operation]], subtle: bool = False) -> Iterator[Mistake[Operation]]:
    """Yield the mistakes of a table, all with the same title."""
    for name, (repair, edits) in rows.items():
        yield Mistake(title, name, repair, edits, subtle)


def more_like_it(count: int, comma: str = "", of: str = "") -> str:
    """Return "and 3 more like it" for 4 things of which a message names the first; empty if there is only one."""
    return f"{comma} and {of}{count - 1} more like it" if count > 1 else ""


def with_attributes(
    where: Callable[[Any], bool] = lambda operation: True, **changes: Any
) -> Callable[[Any], Sequence[Edit]]:
    """Return the ``edits`` of a mistake that gives other attributes to the operations for which ``where`` is true."""
    return lambda operation: operation.edits(**changes) if where(operation) else ()


def at_each_scope(
    mistakes: Iterable[Mistake[Operation]],
    operations: Sequence[Operation],
    place: Callable[[Operation], str] | None = None,
    kinds: Callable[[Operation], Sequence[str]] = lambda operation: (),
    where: str = "",
) -> Iterator[Hypothesis]:
    """Yield each mistake made with all operations at once, with those of each kind, and, if few, with each alone.

    Args:
        mistakes: the mistakes to make.
        operations: the reference's operations of one type.
        place: names the place of an operation, for names and messages; if None, single operations are not tried.
        kinds: names the kinds of an operation, for names and messages, where one argument of TE sets only some of them.
        where: says where the operations are, for names and messages; empty if they are all of their type.
    """
    for mistake in mistakes:
        changed = [operation for operation in operations if mistake.edits(operation)]
        if not changed:
            continue
        yield _made(mistake, operations, where=where)
        for name, some in _by_kind(changed, kinds).items():
            yield _made(mistake, some, "kind", f" in {name}")
        if place is not None and 1 < len(changed) <= MOST_PLACES:
            for name, operation in zip(each_place([place(one) for one in changed]), changed, strict=True):
                yield _made(mistake, [operation], "one", place=name)


def each_place(places: Sequence[str]) -> list[str]:
    """Return a distinct name for each place: if a module has several, the name says which of them it is."""
    seen: Counter[str] = Counter()
    named = []
    for place in places:
        seen[place] += 1
        count = places.count(place)
        named.append(place if count == 1 else f"{place}, the {ordinal(seen[place])} of {count} there")
    return named


def _by_kind(
    operations: Sequence[Operation], kinds: Callable[[Operation], Sequence[str]]
) -> dict[str, list[Operation]]:
    """Return operations by kind, without kinds that have one operation, all of them, or the same ones as another."""
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
        tuple(edit for operation in operations for edit in mistake.edits(operation)),
        subtle=mistake.subtle,
        value=mistake.value,
        tuned=None if family is None else lambda value: _made(family(value), operations, scope, where, place),
        scope=scope,
        place=place,
        family=(mistake.name, mistake.repair) if place else ("", ""),
        code=mistake.code,
        adds=mistake.adds,
    )


# Two mistakes at once, even in the same operation, for example in its mask and in its scale.


def together(first: Sequence[Edit], second: Sequence[Edit]) -> tuple[Edit, ...] | None:
    """Return both mistakes' edits; None if they change the same thing."""
    shared = {one.site for one in first} & {one.site for one in second}
    made = [one for one in (*first, *second) if one.site not in shared]
    for site in shared:
        same = [one for one in (*first, *second) if one.site == site]
        merged = _of_one_operation(*same) if len(same) == 2 else ()
        if not merged:
            return None
        made += merged
    return tuple(made)


def _of_one_operation(one: Edit, other: Edit) -> tuple[Edit, ...]:
    """Return the edits that change an operation in both ways; empty if the two contradict each other."""
    if one.of is None or other.of is None or one.of.operation is not other.of.operation:
        return ()
    changes = _united(one.of.changes, other.of.changes)
    return () if changes is None else tuple(one.of.operation.edits(**changes))


def _united(some: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the merged changes; None if both change the same thing. None inside a tuple leaves an element as it is."""
    united = dict(some)
    for name, value in others.items():
        if name not in united:
            united[name] = value
            continue
        known = united[name]
        if not (isinstance(known, tuple) and isinstance(value, tuple) and len(known) == len(value)):
            return None
        if any(x is not None and y is not None for x, y in zip(known, value, strict=True)):
            return None
        united[name] = tuple(y if x is None else x for x, y in zip(known, value, strict=True))
    return united


# 16-bit dtypes in which a port may hold by mistake what belongs in FP32.


def low_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes to look for in a port whose weights have ``dtype``, the likeliest first.

    BF16 is always among them: autocast turns FP32 into it, and code that was written for BF16 names it.
    """
    return (torch.float16, torch.bfloat16) if dtype is torch.float16 else (torch.bfloat16,)


def short(dtype: torch.dtype) -> str:
    """Return the dtype's short name: ``bf16`` or ``fp16``."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


# Rounding inside a differentiable computation.


def rounded_to(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return ``x`` rounded to ``dtype``, but in its own dtype; a ``dtype`` of None rounds nothing.

    The gradient is that of the identity.
    """
    return x if dtype is None else x + (x.detach().to(dtype).to(x.dtype) - x.detach())
