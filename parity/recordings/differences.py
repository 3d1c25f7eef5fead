"""Find the first value in which two recordings of one pass differ, and say how far, in roundings of its dtype.

Two environments run the same step: other versions of TE or PyTorch, another driver, GPU or container. Where both were
given the same numbers, the first value that differs shows which call computes otherwise. What follows differs because
its arguments do.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import torch
from torch import Tensor

from parity.numerics.errors import norm_of
from parity.recordings.dumps import DumpedFile
from parity.recordings.folder import RecordedPass, StoredPass, key_of
from parity.recordings.joined import JoinedPass
from parity.shown import few_of
from parity.trace.trace import ordinal
from parity.user_error import UserError

Kind = Literal["value", "gradient of value", "gradient of weight", "output", "dumped"]


@dataclass(frozen=True)
class Difference:
    """The first thing in which two passes differ.

    Attributes:
        kind: what it is.
        places: the number of the value in each of the two; -1 for a parameter's gradient or an output.
        name: the function that returned the value, or the parameter or output.
        module: the submodule in which it was computed.
        relative: the norm of the difference over that of the first.
        roundings: the same over the rounding error of its dtype, as a root mean square.
        elements: how many elements differ, of all.
        dtype: its dtype.
    """

    kind: Kind
    places: tuple[int, int]
    name: str
    module: str
    relative: float
    roundings: float
    elements: tuple[int, int]
    dtype: str

    def __str__(self) -> str:
        where = f"{self.name} in {self.module}" if self.module else self.name
        what = {"value": "the result of ", "gradient of value": "the gradient at the result of "}.get(
            self.kind, f"the {self.kind} "
        )
        some, count = self.elements
        return (
            f"{what}{where}: {some:,} of {count:,} elements differ, by {self.relative:.2g} of its norm, which is "
            f"{self.roundings:.2g} times what rounding to {self.dtype} does"
        )


@dataclass(frozen=True)
class Bisection:
    """How two passes differ.

    Attributes:
        forward: the first value that differs; None if all are equal to the bit.
        backward: the first gradient that differs, in the order of the backward pass.
        later: by how much outputs and parameters' gradients differ, the largest first.
    """

    forward: Difference | None
    backward: Difference | None
    later: tuple[Difference, ...]

    @property
    def is_same(self) -> bool:
        """Whether everything is equal to the bit."""
        return self.forward is None and self.backward is None and not self.later


def bisect_passes(first: StoredPass, second: StoredPass) -> Bisection:
    """Return where two recordings of one pass begin to differ.

    Raises:
        UserError: if they are not of the same pass: their weights or arguments differ, or the calls of their models.
    """
    _check_same_beginning(first, second)
    places = list(_pair_values(first, second))
    with first.opened() as one, second.opened() as other:

        def differ(kind: Kind, some: Iterable[tuple[int, int]]) -> Iterator[Difference]:
            for both in some:
                value = first.index.values[both[0]]
                at = both, value.name.removeprefix("te."), value.module
                found = _measure_difference(kind, *at, one(key_of(kind, both[0])), other(key_of(kind, both[1])))
                if found is not None:
                    yield found

        with_gradient = [
            (mine, theirs)
            for mine, theirs in reversed(places)
            if first.index.values[mine].has_gradient and second.index.values[theirs].has_gradient
        ]
        forward, backward = differ("value", places), differ("gradient of value", with_gradient)
        named: tuple[Kind, ...] = "output", "gradient of weight"
        keys = [(kind, name, key_of(kind, name)) for kind in named for name in first.index.names(kind)]
        compared = (_measure_difference(kind, (-1, -1), name, "", one(key), other(key)) for kind, name, key in keys)
        later = [each for each in compared if each is not None]
        return Bisection(
            next(forward, None), next(backward, None), tuple(sorted(later, key=lambda each: -each.roundings))
        )


def bisect_dumps(
    first: Iterable[DumpedFile], second: Iterable[DumpedFile], device: torch.device
) -> tuple[Bisection, list[str]]:
    """Return where two dumps by another tool begin to differ, and what is in only one of them.

    Args:
        first, second: their files, in the order in which they were written.
        device: where to compute.

    Raises:
        UserError: if they have nothing in common, or a file is damaged.
    """
    mine, theirs = _number_files(first), _number_files(second)
    both = [name for name in mine if name in theirs]
    if not both:
        raise UserError(f"the dumps have no tensor in common: {few_of(list(mine))}, and {few_of(list(theirs))}")

    def compare(backward: bool) -> Difference | None:
        found = (
            _measure_difference("dumped", (-1, -1), f"{what} {name}", "", x, other[what])
            for name in both
            if mine[name].is_backward == backward
            for other in [theirs[name].read_values(device)]
            for what, x in mine[name].read_values(device).items()
            if what in other
        )
        return next(filter(None, found), None)

    return Bisection(compare(False), compare(True), ()), sorted(mine.keys() ^ theirs.keys())


def _number_files(files: Iterable[DumpedFile]) -> dict[str, DumpedFile]:
    """Return files by what they hold; what was dumped several times is numbered."""
    found: dict[str, DumpedFile] = {}
    seen: Counter[str] = Counter()
    for one in files:
        name = f"{one.name or 'named'} {one.layer} in {one.place}"
        seen[name] += 1
        found[name + f", the {ordinal(seen[name])}" * (seen[name] > 1)] = one
    return found


def _measure_difference(
    kind: Kind, places: tuple[int, int], name: str, module: str, one: Tensor, other: Tensor
) -> Difference | None:
    if one.dtype is torch.float64 or other.dtype is torch.float64:  # ranks' parts of a gradient were added up
        coarser = max(one, other, key=lambda x: torch.finfo(x.dtype).eps).dtype
        one, other = one.to(coarser), other.to(coarser)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        both = [f"{x.dtype} of {tuple(x.shape)}" for x in (one, other)]
        raise UserError(f"{name} is {both[0]} in the first and {both[1]} in the second: compare runs of the same model")
    if torch.equal(one, other):
        return None
    apart = one.double() - other.double()
    size = norm_of(one.double())
    relative = norm_of(apart) / size if size else math.inf
    # Rounding to nearest leaves an error that is about evenly spread over half an ulp, either way.
    of_rounding = torch.finfo(one.dtype).eps / math.sqrt(24.0) if one.is_floating_point() else 0.0
    count = int((apart != 0).sum() + apart.isnan().sum())
    dtype = str(one.dtype).removeprefix("torch.")
    return Difference(
        kind,
        places,
        name,
        module,
        relative,
        relative / of_rounding if of_rounding else math.inf,
        (count, one.numel()),
        dtype,
    )


def _check_same_beginning(first: StoredPass, second: StoredPass) -> None:
    with first.opened() as one, second.opened() as other:
        for kind, told in (("weight", "parameters"), ("argument", "arguments")):
            mine, theirs = (set(each.index.names(kind)) for each in (first, second))
            if mine != theirs:
                raise UserError(f"the recordings are of other models: {few_of(sorted(mine ^ theirs))} is in only one")
            keys = {name: key_of(kind, name) for name in sorted(mine)}
            differing = [name for name, key in keys.items() if not torch.equal(one(key), other(key))]
            if differing:
                raise UserError(
                    f"the two passes began with other {told} ({few_of(differing)}), so what follows must differ: "
                    "record the first step of both, from the same checkpoint and on the same batch"
                )


def _pair_values(first: StoredPass, second: StoredPass) -> Iterator[tuple[int, int]]:
    """Yield the places of the values that both passes have; ranks may compute some that cannot be put together.

    Raises:
        UserError: if passes that were recorded alike make other calls.
    """
    if isinstance(first, JoinedPass) or isinstance(second, JoinedPass):
        found = [_group_places(one.index) for one in (first, second)]
        alike = (
            zip(some, found[1][key], strict=True) for key, some in found[0].items() if len(some) == len(found[1][key])
        )
        yield from sorted(itertools.chain(*alike))
        return
    calls = [[" in ".join(filter(None, (x.name, x.module))) for x in each.index.values] for each in (first, second)]
    for place, (mine_there, theirs_there) in enumerate(zip_longest(*calls, fillvalue="no call")):
        if mine_there != theirs_there:
            raise UserError(
                f"the two models make other calls from value {place} on: {mine_there}, and {theirs_there}; compare "
                "recordings of the same code and the same attention backend"
            )
        yield place, place


def _group_places(index: RecordedPass) -> dict[tuple[object, ...], list[int]]:
    """Return the places of a pass's values, by function, submodule and shape."""
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, one in enumerate(index.values):
        found[one.name, one.module, index.tensors[key_of("value", place)]].append(place)
    return found
