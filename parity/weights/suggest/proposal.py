"""Propose a weight map for two modules, and say what has no place in it and how ranks divide the parameters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

import torch

from parity import te
from parity.case.case import Case, Pair, Size, as_case
from parity.case.map_check import (
    UNTIED,
    Parameters,
    Problem,
    check_entries,
    lines,
    norm_without_bias,
    other_names,
    tied_elsewhere,
)
from parity.case.patterns import collapsed
from parity.case.registry import checked_ranks
from parity.case.source import AsItIs, FromFile, source_of
from parity.case.transfer import parameter_shapes
from parity.case.validate import build, located
from parity.case.weight_map import Constant, Reorder, Shape, Side, Stack, WeightMap, describe, names, shape_of
from parity.passes.modes import usual_modes
from parity.ranks.launch import IMPORTED_BEFORE, RanksFailed, launch
from parity.ranks.layout import DIVIDING, AxisName, Degrees, Over, Split, degrees, joined, marked, part
from parity.te import Backend, Kernels
from parity.user_error import UserError
from parity.weights.suggest.layouts import Entries, Shapes, geometry_of, stored
from parity.weights.suggest.settle import CLEARLY, Choice, Picks, Settled, Trial, choices, prepare_trial, settle
from parity.weights.suggest.units import (
    BIAS,
    Group,
    Matching,
    Unit,
    is_norm,
    match,
    parts_by_unit,
    units_of,
    with_experts,
)

# What has no place in a suggested map, and what is probably wrong with the modules, in one sentence each.


def parameters_of(pair: Pair) -> tuple[Parameters, Parameters]:
    """Return what a map may name of the reference and of the candidate."""
    reference, candidate = (
        Parameters(kind, parameter_shapes(module), other_names(module))
        for kind, module in (("reference", pair.reference), ("TE", pair.candidate))
    )
    return reference, candidate


def of_one_name(matching: Matching) -> Iterator[Group]:
    """Yield units with the same name that were not matched because their shapes do not go together."""
    named = {(unit.path, unit.expert): unit for unit in matching.reference_left}
    for unit in matching.candidate_left:
        if (other := named.get((unit.path, unit.expert))) is not None:
            yield Group((other,), (unit,))


def problems_of(
    misfits: Sequence[Group],
    reference_left: Sequence[Unit],
    candidate_left: Sequence[Unit],
    parameters: tuple[Parameters, Parameters],
) -> list[str]:
    """Say what has no place in the map; similar layers share a line.

    Args:
        misfits: groups that no layout fits.
        reference_left: units with the parameters that no alternative has.
        candidate_left: the same for the candidate's units.
        parameters: the parameters of both modules.
    """
    told = {
        name for group in misfits for unit in (*group.reference, *group.candidate) for name in unit.parameters.values()
    }
    return lines(
        [
            *map(_describe_misfit, dict.fromkeys(misfits)),
            *(Problem(_of_te(unit, kind)) for unit in candidate_left for kind in unit.without(told).parameters),
            *(
                Problem(_of_reference(unit, kind, *parameters))
                for unit in reference_left
                for kind in unit.without(told).parameters
            ),
        ]
    )


def hints_at_norms(weight_map: WeightMap, reference: Parameters, candidate: Parameters) -> list[str]:
    """Say that TE's LayerNorm may have to be an RMSNorm, if a constant stands for its bias."""
    biases = [bias for left, right in weight_map.items() if isinstance(left, Constant) for bias in names(right)]
    norms = [(bias, norm_without_bias(bias, weight_map, reference, candidate)) for bias in biases]
    return lines(
        Problem(
            f'the reference\'s norm "{norm}" has no bias and looks like an RMSNorm, where TE has "{bias}"',
            'is normalization="RMSNorm" meant?',
        )
        for bias, norm in norms
        if norm is not None
    )


def _describe_misfit(group: Group) -> Problem:
    left, right = _describe_units(group.reference), _describe_units(group.candidate)
    return Problem(
        f"{left} should hold TE's {right} by name, but no layout fits the shapes; are both modules of one size?"
    )


def _of_te(unit: Unit, kind: str) -> str:
    return (
        f'nothing in the reference fits TE\'s "{unit.parameters[kind]}" {unit.shapes[kind]}; build the TE module '
        "without it, or map it by hand"
    )


def _of_reference(unit: Unit, kind: str, reference: Parameters, candidate: Parameters) -> str:
    name, shape = unit.parameters[kind], unit.shapes[kind]
    text = f'the reference\'s "{name}" {shape} has no counterpart in the TE module'
    if (other := tied_elsewhere(name, shape, candidate, reference)) is not None:
        return f'{text}, which ties its "{other}" to "{candidate.others.tied[other]}", {UNTIED}'
    if kind == BIAS:
        option = 'normalization="LayerNorm"' if is_norm(unit) else "bias=True"
    else:
        option = "input_layernorm=True" if is_norm(unit) else ""
    return (
        f"{text}; build that with it{f' ({option}, say)' if option else ', if there is an option'}, or map it by hand"
    )


def _describe_units(units: Sequence[Unit]) -> str:
    named = [f'"{name}" {unit.shapes[kind]}' for unit in units for kind, name in unit.parameters.items()]
    return ", ".join(named)


# Propose a weight map for two modules: by names and shapes and, where these leave it open, by running both.


MAX_RUNS = 300


def suggest_map(
    pair: Case | Pair,
    size: Size | None = None,
    seed: int = 0,
    backend: Backend | Literal["auto"] = "auto",
    keep: bool = True,
    max_runs: int = MAX_RUNS,
    ranks: Sequence[Mapping[str, int]] | Mapping[str, int] | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Suggestion:
    """Suggest a weight map for a pair that has none, or complete the one that it has.

    Both modules run in FP32 on the pair's inputs, in evaluation mode, once for each alternative; the one with the
    smallest error of the outputs is taken. If ranks compute the candidate, it is built on them, and how they divide its
    parameters is suggested as well.

    Args:
        pair: a ``parity.Pair`` or a function decorated with ``@parity.pair``; its ``weights`` may lack entries.
        size: the size at which the modules are built and run; None for the case's first.
        seed: the seed of weights and inputs.
        backend: ``gpu``, ``cpu``, or ``auto`` for TE's real kernels if they can run.
        keep: whether to keep the entries of the pair's ``weights``.
        max_runs: the largest number of alternatives that are run; twice as many if none of the usual ones fits.
        ranks: the layout of ranks that compute the candidate, such as ``dict(tp=2)``, or several of these; None for
            those that the pair is declared with.
        progress: called after each run of a map, with how many were run so far and how many there may be.

    Raises:
        UserError: if the pair cannot be built, or an entry that is kept does not fit the modules.
        parity.te.BackendUnavailable: if the backend is not available on this machine.
    """
    case = as_case(pair)
    if ranks is not None:
        if not isinstance(pair, Case):
            raise UserError("a pair over ranks is built once for each rank: declare a function with @parity.pair")
        case = replace(case, ranks=checked_ranks(ranks))
    chosen = case.sizes[0] if size is None else size
    kernels = te.kernels(backend)
    with located(case, chosen), torch.random.fork_rng(), usual_modes():
        torch.manual_seed(seed)
        built, _ = build(case, kernels.te, chosen)
        kept = dict(built.weights) if keep else {}
        reference, candidate = parameters_of(built)
        shapes = Shapes(reference.shapes, candidate.shapes)
        check_entries(kept, reference.shapes, candidate.shapes, reference.others, candidate.others)
    open_choices, problems = _open_choices(built, shapes, kept)
    if problems:
        suggestion = Suggestion(_make_map(kept, open_choices, (0,) * len(open_choices)), problems=tuple(problems))
    else:
        with usual_modes():
            suggestion = _settle_choices(built, chosen, seed, kernels, kept, open_choices, max_runs, progress)
    hints = () if suggestion.fits else tuple(hints_at_norms(suggestion.weights, reference, candidate))
    ordered = _in_order(suggestion.weights, list(shapes.candidate))
    written = collapsed(ordered, shapes.reference, shapes.candidate)
    suggestion = replace(suggestion, weights=ordered, written=written, hints=hints)
    if not case.ranks:
        return suggestion
    parts, unknown = divided(case, chosen, case.ranks, suggestion.weights, shapes)
    return replace(suggestion, divided=parts, problems=(*suggestion.problems, *unknown))


def _open_choices(pair: Pair, shapes: Shapes, kept: WeightMap) -> tuple[list[Choice], list[str]]:
    """Return the choices for the parameters that no kept entry names, and the problems of those without a place."""
    candidate_units = units_of(shapes.candidate)
    experts = 1 + max((unit.expert for unit in candidate_units if unit.expert is not None), default=-1)
    units = with_experts(units_of(shapes.reference), experts), candidate_units
    used = [{name for entry in kept.items() for name in names(entry[side])} for side in (0, 1)]
    reference, candidate = (
        [left for unit in side if (left := unit.without(taken)).parameters]
        for side, taken in zip(units, used, strict=True)
    )
    matching = match(reference, candidate, (parts_by_unit(units[0]), parts_by_unit(units[1])))
    told = stored(pair.reference), stored(pair.candidate)
    found, misfits = choices(matching, shapes, geometry_of(pair.candidate, pair.reference), told)
    mapped = {
        name for choice in found for left, right in choice.layouts[0].entries for name in (*names(left), *names(right))
    }
    misfits += [*matching.misfits, *of_one_name(matching)]
    left_over = [unit.without(mapped) for unit in reference], [unit.without(mapped) for unit in candidate]
    return found, problems_of(misfits, *left_over, parameters_of(pair))


def _settle_choices(
    pair: Pair,
    size: Size,
    seed: int,
    kernels: Kernels,
    kept: WeightMap,
    found: Sequence[Choice],
    max_runs: int,
    progress: Callable[[int, int], object],
) -> Suggestion:
    """Return the suggestion after running both modules under the alternatives, the usual ones first."""
    likeliest = (0,) * len(found)
    try:
        trial = prepare_trial(pair, size, seed, kernels)
        settled, usual = _search_alternatives(trial, kept, found, max_runs, progress)
    except UserError as error:
        return Suggestion(
            _make_map(kept, found, likeliest),
            tuple(_list_decisions(found, likeliest, None)),
            (f"the modules could not be run, so this map is based only on names and shapes: {error}",),
        )
    return Suggestion(
        _make_map(kept, usual, settled.picks),
        tuple(_list_decisions(usual, settled.picks, settled)),
        error=settled.error,
        expected=trial.expected,
        limit=trial.limit,
        runs=settled.runs,
    )


def _search_alternatives(
    trial: Trial,
    kept: WeightMap,
    found: Sequence[Choice],
    max_runs: int,
    progress: Callable[[int, int], object],
) -> tuple[Settled, Sequence[Choice]]:
    """Return the result of the search, and the choices that it was about."""
    usual = [choice.usual() for choice in found]
    runs = 0

    def search(among: Sequence[Choice]) -> Settled:
        counts = [len(choice.layouts) for choice in among]
        least = min(max_runs, 1 + sum(count - 1 for count in counts))  # more are run only if none of these fits

        def error(picks: Picks) -> float:
            nonlocal runs
            found = trial.error(_make_map(kept, among, picks))
            runs += 1
            progress(runs, max(runs, least))
            return found

        return settle(counts, error, trial.limit, max_runs)

    settled = search(usual)
    if settled.error <= trial.limit or usual == list(found):
        return settled, usual
    further = search(found)
    # If neither fits, something else is wrong, and a slightly lower error is no reason for the unusual layout.
    enough = max(trial.limit, CLEARLY * settled.error)
    if further.error < enough:
        return further, found
    return replace(settled, runs=max(settled.runs, further.runs)), usual


def _make_map(kept: WeightMap, found: Sequence[Choice], picks: Picks) -> WeightMap:
    picked = (choice.layouts[pick].entries for choice, pick in zip(found, picks, strict=True))
    return {**kept, **dict(chain.from_iterable(picked))}


def _in_order(weight_map: WeightMap, candidate: Sequence[str]) -> WeightMap:
    """Return the entries in the order in which the candidate declares its parameters."""
    return dict(sorted(weight_map.items(), key=lambda entry: candidate.index(next(names(entry[1])))))


def _list_decisions(found: Sequence[Choice], picks: Picks, settled: Settled | None) -> Iterator[Decision]:
    for i, choice in enumerate(found):
        if len(choice.layouts) == 1:
            continue
        entries = [choice.first(layout) for layout in choice.layouts]
        shared = set(entries[0]).intersection(*entries[1:])
        errors = settled.alternatives[i] if settled else [float("nan")] * len(entries)
        alternatives = [
            Alternative(tuple(entry for entry in own if entry not in shared), error, pick == picks[i])
            for pick, (own, error) in enumerate(zip(entries, errors, strict=True))
        ]
        alternatives.sort(key=lambda alternative: (not alternative.chosen, alternative.error))
        yield Decision(choice.about, tuple(alternatives), choice.repeats)


# A suggestion as plain data and as text.


# The data.


Outcome = Literal["settled", "tied", "not run"]


@dataclass(frozen=True)
class Alternative:
    """One of the ways in which parameters could map.

    Attributes:
        entries: left and right sides of the weight map, without those that all alternatives share.
        error: relative L2 error of the outputs with it, all else as suggested; NaN if it was not run.
        chosen: whether the suggestion has it.
    """

    entries: Entries
    error: float
    chosen: bool


@dataclass(frozen=True)
class Decision:
    """A question that names and shapes left open.

    Attributes:
        about: TE's parameters, those of the first layer if layers repeat it.
        alternatives: the chosen one first, then by error.
        repeats: how many layers it was decided for at once.
    """

    about: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    repeats: int = 1

    @property
    def outcome(self) -> Outcome:
        """``settled`` if the chosen error is less than half of any other, else ``tied``; ``not run`` if one is NaN."""
        errors = [alternative.error for alternative in self.alternatives]
        if any(map(math.isnan, errors)):
            return "not run"
        return "settled" if errors[0] < CLEARLY * min(errors[1:]) else "tied"


@dataclass(frozen=True)
class Suggestion:
    """A weight map for a pair, and the reasons for it.

    Attributes:
        weights: the map; without an entry for what is in ``problems``.
        decisions: what names and shapes left open, and how it was settled.
        problems: what has no place in the map, or why the modules could not be run; one sentence each.
        hints: what is probably wrong with the modules, if the map does not fit; one sentence each.
        error: relative L2 error of the outputs in FP32 under the map; NaN if it could not be run.
        expected: what FP32 costs the reference itself (TE multiplies in TF32); NaN if it could not be run.
        limit: the map fits if the error is at most this.
        runs: how many maps were run.
        divided: how ranks divide the candidate's parameters, if that was asked for.
        written: the map as it is written into a file, with one entry, such as ``"layers.{i}.weight"``, for what all
            layers have in common.
    """

    weights: WeightMap
    decisions: tuple[Decision, ...] = ()
    problems: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    error: float = math.nan
    expected: float = math.nan
    limit: float = math.nan
    runs: int = 0
    divided: tuple[Divided, ...] = ()
    written: WeightMap = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Return whether the two modules agree under the map, as far as FP32 can tell."""
        return self.error <= self.limit

    @property
    def settled(self) -> bool:
        """Return whether the map is complete, fits, and no alternative fits as well."""
        return self.fits and not self.problems and all(decision.outcome == "settled" for decision in self.decisions)


# A suggestion for a terminal: the map as it goes into a user's file, then the reasons for it.


_SHOWN_ENTRIES = 3
_SHOWN_ALTERNATIVES = 6


def python(weight_map: WeightMap) -> str:
    """Return the argument ``weights=`` of ``parity.Pair``, one entry per line."""
    entries = "".join(f"    {_format_entry(left, right)},\n" for left, right in weight_map.items())
    return f"weights={{\n{entries}}},"


def python_over_ranks(divided: Sequence[Divided]) -> str:
    """Return the argument ``parallel=`` of ``parity.Pair``, one parameter per line."""
    entries = [(f'"{one.name}": [{", ".join(map(_format_over, one.split))}],', one.reason) for one in divided]
    width = max(len(entry) for entry, _ in entries)
    lines = "".join(f"        {entry:<{width}}  # {reason}\n" for entry, reason in entries)
    return f"parallel=parity.Parallel(\n    weights={{\n{lines}    }},\n),"


def _format_over(one: Over) -> str:
    blocks = f", blocks={one.blocks}" if one.blocks > 1 else ""
    return f'parity.over("{one.axis}", dim={one.dim}{blocks})'


def explain(suggestion: Suggestion) -> str:
    """Say what was open, how it was settled, and what to look at next."""
    lines = list(suggestion.problems)
    for outcome, heading in (
        ("settled", "decided by running both modules in FP32, by the relative L2 error of the outputs:"),
        ("tied", "NOT decided, since running both modules shows no clear winner; errors of the outputs:"),
        (
            "not run",
            "NOT decided; sorted by names and shapes, the likeliest first, with the errors of those that were run:",
        ),
    ):
        decisions = [decision for decision in suggestion.decisions if decision.outcome == outcome]
        if decisions:
            lines += [heading, *(line for decision in decisions for line in _explain_decision(decision))]
    return "\n".join([*lines, *_state_verdict(suggestion)])


def _explain_decision(decision: Decision) -> Iterator[str]:
    layers = f", in {decision.repeats} similar layers" if decision.repeats > 1 else ""
    yield f"  {', '.join(decision.about[:_SHOWN_ENTRIES])}{layers}"
    for alternative in decision.alternatives[:_SHOWN_ALTERNATIVES]:
        error = "not run" if math.isnan(alternative.error) else f"{alternative.error:.2g}"
        yield f"    {error:>8}  {_format_entries(alternative)}"
    hidden = len(decision.alternatives) - _SHOWN_ALTERNATIVES
    if hidden > 0:
        yield f"              and {hidden} more"


def _format_entries(alternative: Alternative) -> str:
    shown = [_format_entry(left, right) for left, right in alternative.entries[:_SHOWN_ENTRIES]]
    return ", ".join(shown) + (", ..." if len(alternative.entries) > _SHOWN_ENTRIES else "")


def _state_verdict(suggestion: Suggestion) -> Iterator[str]:
    if math.isnan(suggestion.error):
        yield "The map was not run: check it, and complete it by hand."
        return
    figures = f"With this map the error is {suggestion.error:.2g}; FP32 itself costs {suggestion.expected:.2g}"
    if suggestion.fits:
        yield f"{figures}: the map fits ({suggestion.runs} map{'s' * (suggestion.runs != 1)} run)."
    else:
        yield f"{figures}: NO map fits; of {suggestion.runs} maps that were run, none is clearly better than this one."
        yield "Look at what a weight map cannot express: the activation, the norm and its eps, the mask, RoPE, the"
        yield "scale of the softmax, the order of inputs. With this map in the pair, `parity run` tries the known"
        yield "mistakes and names the one that explains the rest."


def _format_entry(left: Side, right: Side) -> str:
    return f"{_format_side(left)}: {_format_side(right)}"


def _format_side(side: Side) -> str:
    written = describe(side, "parity.")
    if isinstance(side, Reorder):
        count = len(side.order)
        if side.order == (*range(0, count, 2), *range(1, count, 2)):
            written = written.replace(repr(side.order), f"(*range(0, {count}, 2), *range(1, {count}, 2))")
    return written


# How ranks divide a candidate's parameters: as TE marks them, else as their shapes show.


@dataclass(frozen=True)
class Divided:
    """Say how ranks divide one parameter of the candidate.

    Attributes:
        name: the whole parameter's name.
        split: one axis after the other; empty if each rank that holds the parameter holds all of it.
        reason: the evidence for this, in a few words.
    """

    name: str
    split: Split
    reason: str


# On a rank, where the candidate is built and not run.


@dataclass(frozen=True, eq=False)
class _Asked:
    source: FromFile | AsItIs
    made: Degrees
    size: Size
    shapes: Mapping[str, Shape]


@dataclass(frozen=True)
class _Seen:
    """Hold what a rank has of a whole parameter.

    Attributes:
        shape: the shape of its part.
        marked: how TE marks the whole as divided.
        sharded: whether FSDP holds a part of it and reports the shape of the whole.
    """

    shape: Shape
    marked: Split
    sharded: bool


def _on_rank(asked: _Asked) -> dict[str, _Seen]:
    """Return what this rank has of each parameter, by the names of the whole parameters."""
    kernels, ranks = te.kernels("cpu"), joined(asked.made)
    case = replace(asked.source.case(), at=ranks, ranks=(asked.made,))
    with usual_modes(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        candidate = case.build(kernels.te, asked.size).candidate
    parameters = dict(candidate.named_parameters())
    held = marked(candidate, asked.shapes, asked.made, asked.made.place(ranks.world.rank))
    return {
        one.whole: _Seen(tuple(parameters[name].shape), one.split, hasattr(parameters[name], "device_mesh"))
        for name, one in held.items()
    }


# In this process: compare what all ranks have along one axis at a time, so that nothing else divides a parameter.


def divided(
    case: Case, size: Size, among: Sequence[Degrees], weights: WeightMap, shapes: Shapes
) -> tuple[tuple[Divided, ...], tuple[str, ...]]:
    """Return how each parameter of the candidate is divided along every axis, and sentences about what is not known.

    Args:
        case: the candidate's case.
        size: the size at which it is built.
        among: how many ranks there are, by axis.
        weights: the weight map, by which a parameter may hold several of the reference's.
        shapes: the shapes of all parameters, in one process.
    """
    found: dict[str, list[Divided]] = {name: [] for name in shapes.candidate}
    problems: dict[str, None] = {}
    packed = {right: left for left, right in weights.items() if isinstance(right, str)}
    source = source_of(case)
    most = {axis: max(one.of(axis) for one in among) for axis in DIVIDING}
    for axis, count in most.items():
        if count == 1:
            continue
        made = degrees({axis: count})
        try:
            asked = _Asked(source, made, size, shapes.candidate)
            ranks = launch(_on_rank, count, [asked], imported_before=(*IMPORTED_BEFORE, __name__))
        except RanksFailed as error:
            first = error.failures[0]
            problems[f"over {made.label}, rank {first.rank} {first.how}: {first.what}"] = None
            continue
        for name, whole in shapes.candidate.items():
            holding = {rank: seen[name] for rank, seen in enumerate(ranks) if name in seen}
            try:
                found[name].append(_over_ranks(axis, made, name, whole, holding, packed.get(name), shapes.reference))
            except UserError as error:
                problems[f"over {made.label}, {error}"] = None
    return tuple(_join_splits(name, each) for name, each in found.items() if each), tuple(problems)


def _over_ranks(
    axis: AxisName,
    made: Degrees,
    name: str,
    whole: Shape,
    holding: Mapping[int, _Seen],
    left: Side | None,
    reference: Mapping[str, Shape],
) -> Divided:
    """Return how a parameter is divided along an axis, judging by what ranks have of it.

    Raises:
        UserError: if nothing shows this, or ``over`` cannot express it.
    """
    if not holding:
        raise UserError(f"no rank has {name}, which the candidate has in one process")
    seen = next(iter(holding.values()))
    if seen.shape == whole:
        if seen.sharded:
            return Divided(name, (), "whole, as FSDP tells it")
        return Divided(
            name, (), "whole" if len(holding) == made.count else f"whole, on {axis} rank {next(iter(holding))}"
        )
    by_shape = tuple(Over(axis, dim) for dim, length in enumerate(whole) if seen.shape[dim : dim + 1] != (length,))
    for split, reason in ((seen.marked, "as TE marks it"), (by_shape, "by its shape")):
        if len(split) == 1 and _part_of(whole, split, made) == seen.shape:
            return Divided(name, *_in_blocks(name, split[0], reason, left, reference))
    raise UserError(f"{name} is {seen.shape} on a rank, and {whole} in one process: no single split gives these shapes")


def _in_blocks(
    name: str, one: Over, reason: str, left: Side | None, reference: Mapping[str, Shape]
) -> tuple[Split, str]:
    """Return the split; if a parameter holds several of the reference's, each of them is divided separately."""
    if not isinstance(left, Stack) or left.dim != one.dim or one.blocks > 1:
        return (one,), reason
    lengths = [shape_of(part, reference)[left.dim] for part in left.parts]
    if len(set(lengths)) > 1:
        raise UserError(
            f"{name} holds parts of {', '.join(map(str, lengths))}, and parity.over divides equal ones: give each a "
            "parameter of its own"
        )
    return (replace(one, blocks=len(lengths)),), f"{reason}; each of its {len(lengths)} parts by itself"


def _part_of(whole: Shape, split: Split, made: Degrees) -> Shape | None:
    """Return the shape of a rank's part, which is the same on all; None if the whole does not divide."""
    try:
        return tuple(part(torch.empty(whole, device="meta"), split, made, made.place(0)).shape)
    except UserError:
        return None


def _join_splits(name: str, each: Sequence[Divided]) -> Divided:
    """Return the split along all axes."""
    split = tuple(one for own in each for one in own.split)
    reasons = dict.fromkeys(own.reason for own in each if own.split or not split)
    return Divided(name, split, "; ".join(reasons))
