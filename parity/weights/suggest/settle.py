"""Settle what names and shapes leave open, by running both modules under each answer."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, permutations, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parity.case import transfer
from parity.case.case import Pair, Rng, Size, draw_inputs
from parity.case.weight_map import WeightMap, describe, names
from parity.numerics.errors import measure
from parity.numerics.golden import in_fp64
from parity.numerics.rounding import rounded
from parity.passes.one_pass import outputs_of
from parity.passes.prepare import cast, vary_constants
from parity.te import PRECISIONS, Kernels, state
from parity.te.state import dequantized, moved
from parity.trace.trace import grouped
from parity.trace.whose import first_paragraph, users_line
from parity.user_error import INTERRUPTS, UserError
from parity.weights.suggest.layouts import (
    Entries,
    Geometry,
    Layout,
    Shapes,
    Stored,
    constant_layouts,
    copied_entries,
    layouts,
    with_doubts,
)
from parity.weights.suggest.units import EMBEDDING, HEAD, Group, Matching, Unit, is_norm, parts_by_unit

# The questions that names and shapes leave open, each with the answers to be tried.


# If at most this many units were matched only by their order, every order is tried; else, each exchange of two.
_ALL_ORDERS_UP_TO = 4


@dataclass(frozen=True)
class Choice:
    """Alternatives of which one is right.

    Attributes:
        layouts: the alternatives, the likeliest first.
        repeats: how many layers of a model have this choice; each alternative has the entries of all of them, by layer.
    """

    layouts: tuple[Layout, ...]
    repeats: int = 1

    @property
    def about(self) -> tuple[str, ...]:
        """TE's parameters of the first layer."""
        return tuple(name for _, right in self.first(self.layouts[0]) for name in names(right))

    def first(self, layout: Layout) -> Entries:
        """Return an alternative's entries for the first layer."""
        return layout.entries[: len(layout.entries) // self.repeats]

    def usual(self) -> Choice:
        """Return the choice without unusual alternatives."""
        return replace(self, layouts=tuple(layout for layout in self.layouts if layout.usual))


def choices(
    matching: Matching, shapes: Shapes, geometry: Geometry, stored: tuple[Stored, Stored]
) -> tuple[list[Choice], list[Group]]:
    """Return the choices, and the groups that no layout fits.

    Layers that repeat a group also repeat its layout, so they are one choice. Layouts that contradict what the
    reference and the candidate say about how they store their weights are unusual.
    """
    alternatives = [(group, with_doubts(layouts(group, shapes, geometry), *stored)) for group in matching.groups]
    misfits = [group for group, found in alternatives if not found]
    twins = _find_twins(matching, {name: i for i, name in enumerate(shapes.candidate)})
    found = [_with_twins(own, group, twins.get(group, [])) for group, own in alternatives if own]
    single = set(matching.candidate_left).difference(*twins.values())
    found += [own for unit in matching.candidate_left if unit in single and (own := constant_layouts(unit))]
    found += [
        own
        for groups in matching.exchangeable
        if (own := with_doubts(list(_permute_groups(groups, shapes, geometry)), *stored))
    ]
    families = grouped(found, lambda own: tuple(_without_numbers(layout.entries) for layout in own))
    return [_join_layouts(members) for members in families.values()], misfits


def _find_twins(matching: Matching, declared: Mapping[str, int]) -> dict[Group, list[Unit]]:
    """Return units of TE that the reference lacks, by the group that may hold the same numbers.

    A layer of TE with parallel blocks has two norms, while the reference may have only one, which comes first in TE. A
    reference may tie its head to its embedding, while TE's module has both.
    """

    def place(unit: Unit) -> int:
        return min(declared[name] for name in unit.parameters.values())

    twins: dict[Group, list[Unit]] = {}
    for unit in matching.candidate_left:
        alike = [
            group
            for group in matching.groups
            if len(group.reference) == len(group.candidate) == 1 and group.candidate[0].shape == unit.shape
        ]
        tied = [group for group in alike if _may_be_tied(group.candidate[0], unit)]
        norms = [group for group in alike if is_norm(group.candidate[0]) and place(group.candidate[0]) < place(unit)]
        if is_norm(unit) and norms:
            twins.setdefault(max(norms, key=lambda group: place(group.candidate[0])), []).append(unit)
        elif len(tied) == 1:
            twins.setdefault(tied[0], []).append(unit)
    return twins


def _may_be_tied(one: Unit, other: Unit) -> bool:
    """Return whether the two may be an embedding and the head tied to it; at least one must have a telling name."""
    told = {part for unit in (one, other) for part in parts_by_unit([unit]).get(unit, ("untold",))}
    return len(one.shape) == 2 and told in ({EMBEDDING, HEAD}, {EMBEDDING, "untold"}, {HEAD, "untold"})


def _with_twins(own: list[Layout], group: Group, twins: Sequence[Unit]) -> list[Layout]:
    """Return a group's layouts, each with the same numbers in its twins, or with constants in them."""
    for twin in twins:
        copied = [replace(layout, entries=copied_entries(layout.entries, group.candidate[0], twin)) for layout in own]
        apart = [
            replace(layout, entries=layout.entries + constants.entries)
            for layout in own
            for constants in constant_layouts(twin)
        ]
        own = copied + apart
    return own


def _permute_groups(groups: Sequence[Group], shapes: Shapes, geometry: Geometry) -> Iterator[Layout]:
    """Yield layouts of groups with one shape, in which the reference's units may belong to any of the groups."""
    found = list(_all_orders(groups, shapes, geometry))
    named = [sum(1 for left, _ in layout.entries for _ in names(left)) for layout in found]
    # Leave out orders that have no place for one of the reference's biases.
    yield from (layout for layout, count in zip(found, named, strict=True) if count == max(named))


def _all_orders(groups: Sequence[Group], shapes: Shapes, geometry: Geometry) -> Iterator[Layout]:
    if len(groups) <= _ALL_ORDERS_UP_TO:
        orders = list(permutations(range(len(groups))))
    else:
        orders = [tuple(range(len(groups))), *_list_exchanges(len(groups))]
    for order in orders:
        own = [
            layouts(Group(groups[i].reference, group.candidate, group.parts, named=False), shapes, geometry)
            for i, group in zip(order, groups, strict=True)
        ]
        for same in zip(*own, strict=False):
            yield Layout(tuple(chain.from_iterable(layout.entries for layout in same)))


def _list_exchanges(count: int) -> Iterator[tuple[int, ...]]:
    for one, other in combinations(range(count), 2):
        order = list(range(count))
        order[one], order[other] = order[other], order[one]
        yield tuple(order)


def _without_numbers(entries: Entries) -> str:
    """Return the entries with the numbers in their names left open, since these count layers or experts."""
    written = "; ".join(f"{describe(left)}: {describe(right)}" for left, right in entries)
    return re.sub(r'"[^"]*"', lambda name: re.sub(r"\d+", "#", name[0]), written)


def _join_layouts(members: Sequence[Sequence[Layout]]) -> Choice:
    joint = tuple(
        Layout(tuple(chain.from_iterable(layout.entries for layout in same)), same[0].usual)
        for same in zip(*members, strict=True)
    )
    return Choice(joint, len(members))


# Find the alternatives under which two modules agree best: a search over choices, with a limited number of runs.


Picks = tuple[int, ...]
ErrorOf = Callable[[Picks], float]

# An error must be lower by this factor to count as lower. The noise of two maps that fit equally well differs by a few
# per cent; a wrong entry adds an error of its own, and the squares of the two add up.
CLEARLY = 0.5
_BETTER = 0.99


@dataclass(frozen=True)
class Settled:
    """Hold the result of a search.

    Attributes:
        picks: the chosen alternative of each choice.
        error: the error under these picks.
        alternatives: for each choice, the error of each of its alternatives with the other choices as picked; NaN if no
            run was left to try it.
        runs: how many maps were tried.
    """

    picks: Picks
    error: float
    alternatives: tuple[tuple[float, ...], ...]
    runs: int


class _Search:
    """The errors that are known so far, and how many runs there may be."""

    def __init__(self, error_of: ErrorOf, max_runs: int) -> None:
        self._error_of = error_of
        self._known: dict[Picks, float] = {}
        self.max_runs = max_runs

    @property
    def runs(self) -> int:
        return len(self._known)

    @property
    def best(self) -> Picks:
        """The picks with the smallest error; among equals the first that was tried, which is the likeliest."""
        return min(self._known, key=lambda picks: self._known[picks])

    def error(self, picks: Picks) -> float:
        """Return the error under picks; NaN if no run is left."""
        if picks not in self._known:
            if self.runs >= self.max_runs:
                return math.nan
            self._known[picks] = self._error_of(picks)
        return self._known[picks]

    def try_until(self, limit: float, candidates: Iterable[Picks]) -> None:
        """Try picks one after another until one is within the limit or no run is left."""
        for picks in candidates:
            if not self.error(picks) > limit:
                return


def settle(counts: Sequence[int], error_of: ErrorOf, limit: float, max_runs: int) -> Settled:
    """Search for picks whose error is at most ``limit``, or else for the best.

    From the likeliest picks, choices are changed one by one as long as the error falls. If that ends above the limit,
    all combinations are tried if the runs suffice, else pairs of choices and random starts: in a chain of layers,
    nothing gets better before everything is right.

    Args:
        counts: how many alternatives each choice has, the likeliest first.
        error_of: returns the error under picks; costs a run.
        limit: an error that is good enough to end the search.
        max_runs: how often ``error_of`` may be called, at least once.
    """
    for_the_end = sum(count - 1 for count in counts)
    search = _Search(error_of, max(1, max_runs - for_the_end))
    best = _improve_picks((0,) * len(counts), counts, search, limit)
    if search.error(best) > limit:
        if math.prod(counts) <= search.max_runs:
            search.try_until(limit, product(*map(range, counts)))
        else:
            search.try_until(limit, _change_pairs(best, counts))
            _restart_search(counts, search, limit)
        best = search.best
    search.max_runs = max_runs
    best = _improve_picks(best, counts, search, limit)
    alternatives = tuple(
        tuple(search.error((*best[:i], pick, *best[i + 1 :])) for pick in range(count))
        for i, count in enumerate(counts)
    )
    return Settled(best, search.error(best), alternatives, search.runs)


def _improve_picks(start: Picks, counts: Sequence[int], search: _Search, limit: float) -> Picks:
    """Change one choice after another to its best alternative until no change helps.

    Once the error is within the limit, only changes that clearly help are made.
    """
    best, error = start, search.error(start)
    moved = True
    while moved:
        moved = False
        for i, count in enumerate(counts):
            for pick in range(count):
                picks = (*best[:i], pick, *best[i + 1 :])
                other = search.error(picks)
                if other < error * (_BETTER if error > limit else CLEARLY):
                    best, error, moved = picks, other, True
    return best


def _change_pairs(best: Picks, counts: Sequence[int]) -> Iterator[Picks]:
    """Yield the picks with two choices changed."""
    for i, j in combinations(range(len(counts)), 2):
        for one, other in product(range(counts[i]), range(counts[j])):
            picks = list(best)
            picks[i], picks[j] = one, other
            yield tuple(picks)


def _restart_search(counts: Sequence[int], search: _Search, limit: float) -> None:
    """Descend from the best so far, then from random picks, while there are runs."""
    start = search.best
    generator = random.Random(0)
    while search.runs < search.max_runs:
        if search.error(_improve_picks(start, counts, search, limit)) <= limit:
            return
        start = tuple(generator.randrange(count) for count in counts)


# Run both modules to see how far the candidate's outputs are from the reference's under a weight map.


FP32 = PRECISIONS["fp32"]
# A map fits if the error is at most this many times what rounding costs the reference. Measured over the default suite
# (TE 2.20.2 on emulated kernels): 1.00 to 1.09 times with right maps, 890 times or more with one wrong entry.
FITS_WITHIN = 3.0


@dataclass(frozen=True)
class Trial:
    """Two modules, ready to be run under one weight map after another.

    Attributes:
        candidate: the candidate in FP32, in evaluation mode, so that no dropout is drawn.
        call: how to call it, or None.
        inputs: the inputs as the pair returns them, in FP32.
        reference_weights: the reference's weights by name, in FP32.
        golden: the reference's outputs in FP64.
        expected: the relative L2 error that TF32's rounding costs the reference itself, the worst of all outputs.
        limit: the largest relative L2 error at which a map fits.
    """

    candidate: nn.Module
    call: Callable[..., Any] | None
    inputs: Any
    reference_weights: Mapping[str, Tensor]
    golden: Mapping[str, Tensor]
    expected: float
    limit: float

    def error(self, weight_map: WeightMap) -> float:
        """Return the largest relative L2 error of the candidate's outputs; infinite if one is not finite.

        Raises:
            UserError: if the candidate raises or returns outputs of other shapes than the reference's.
        """
        shapes = transfer.parameter_shapes(self.candidate)
        transfer.fill(self.candidate, transfer.to_candidate(weight_map, self.reference_weights, shapes))
        with state.fresh_caches():
            return _worst_error(self._run_candidate(), self.golden)

    def _run_candidate(self) -> dict[str, Tensor]:
        """Return the outputs; gradients are on only if it does not run without them, as with TE's offloading."""
        try:
            with torch.no_grad():
                return _compute_outputs("candidate", self.candidate, self.call, self.inputs)
        except UserError:
            inputs = tree_map_only(Tensor, lambda x: x.clone().requires_grad_(x.is_floating_point()), self.inputs)
            with torch.enable_grad():
                outputs = _compute_outputs("candidate", self.candidate, self.call, inputs)
            return {name: output.detach() for name, output in outputs.items()}


def prepare_trial(pair: Pair, size: Size, seed: int, kernels: Kernels) -> Trial:
    """Run the reference in FP64, and under FP32's rounding model.

    Parameters whose elements are all equal get noise first, since two norms that are all ones could not be told apart.
    Parameters that TE holds quantized are converted to FP32, since their format's error would hide a wrong entry.

    Args:
        pair: the pair, whose modules are cast, moved, and given weights.
        size: the case's size.
        seed: the seed of the inputs and of the noise.
        kernels: the kernels on which the candidate runs.

    Raises:
        UserError: if the reference raises, returns no floating-point tensor, or is not finite or all zero.
    """
    reference = pair.reference.to(kernels.device).eval()
    candidate = dequantized(moved(pair.candidate, device=kernels.device)).float().eval()
    vary_constants(reference, Rng(seed, "weights"))
    inputs = cast(tree_map_only(Tensor, lambda x: x.to(kernels.device), draw_inputs(pair, size, Rng(seed))), FP32.dtype)
    held = {name: parameter.detach().float() for name, parameter in reference.named_parameters()}
    with torch.no_grad():
        with in_fp64():
            golden = _compute_outputs("reference", reference.double(), pair.call_reference, cast(inputs, torch.float64))
        _check_golden(golden)
        with rounded(FP32.rounding, reference.float().parameters()):
            modelled = _compute_outputs("reference", reference, pair.call_reference, inputs)
    errors = {name: measure(output, golden[name], FP32.dtype) for name, output in modelled.items()}
    expected = max(error.relative_l2 for error in errors.values())
    limit = FITS_WITHIN * max(expected, torch.finfo(FP32.dtype).eps)
    return Trial(candidate, pair.call_candidate, inputs, held, golden, expected, limit)


def _compute_outputs(role: str, module: nn.Module, call: Callable[..., Any] | None, inputs: Any) -> dict[str, Tensor]:
    try:
        return outputs_of(module, call, inputs)
    except (UserError, *INTERRUPTS):
        raise
    except BaseException as error:
        place = f"; at {users_line(error)}" if users_line(error) else ""
        raise UserError(f"the {role} raised {type(error).__name__}: {first_paragraph(error)}{place}") from error


def _check_golden(golden: Mapping[str, Tensor]) -> None:
    if not golden:
        raise UserError("the reference returns no floating-point tensor, so weight maps cannot be compared")
    for name, output in golden.items():
        if not output.isfinite().all():
            raise UserError(f"the reference's {name} is not finite in FP64; look at the weights and inputs")
        if not output.any():
            raise UserError(f"the reference's {name} is all zero on these inputs, so weight maps cannot be compared")


def _worst_error(outputs: Mapping[str, Tensor], golden: Mapping[str, Tensor]) -> float:
    shapes = [{name: tuple(output.shape) for name, output in side.items()} for side in (outputs, golden)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"the candidate returns {shapes[0]} where the reference returns {shapes[1]}; "
            "bring them to one shape in the pair's call_candidate or call_reference"
        )
    errors = [measure(output, golden[name], FP32.dtype) for name, output in outputs.items()]
    return max(error.relative_l2 if error.finite else float("inf") for error in errors)
