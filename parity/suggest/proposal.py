"""Propose a weight map for two modules, and say what has no place in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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
from parity.case.transfer import parameter_shapes
from parity.case.validate import build, located
from parity.case.weight_map import Constant, Side, WeightMap, names
from parity.passes.modes import usual_modes
from parity.suggest.layouts import Entries, Shapes, geometry_of
from parity.suggest.matching import Group, Matching, match
from parity.suggest.over_ranks import divided
from parity.suggest.settle import CLEARLY, Choice, Picks, Settled, Trial, choices, prepare_trial, settle
from parity.suggest.stored import stored
from parity.suggest.suggestion import Alternative, Decision, Suggestion
from parity.suggest.units import BIAS, Unit, is_norm, parts_by_unit, units_of, with_experts
from parity.te import Backend, Kernels
from parity.user_error import UserError

# What has no place in a suggested map, and what is probably wrong with the modules, in a sentence each.


def parameters_of(pair: Pair) -> tuple[Parameters, Parameters]:
    """Return what a map may name of the reference and of the candidate."""
    reference, candidate = (
        Parameters(kind, parameter_shapes(module), other_names(module))
        for kind, module in (("reference", pair.reference), ("TE", pair.candidate))
    )
    return reference, candidate


def of_one_name(matching: Matching) -> Iterator[Group]:
    """Yield units with the same name that were not matched, since their shapes do not go together."""
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
        reference_left: units with those parameters that no alternative has.
        candidate_left: the same for the candidate's units.
        parameters: those of both modules.
    """
    told = {
        name for group in misfits for unit in (*group.reference, *group.candidate) for name in unit.parameters.values()
    }
    return lines(
        [
            *map(_misfit, dict.fromkeys(misfits)),
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


def _misfit(group: Group) -> Problem:
    left, right = _listed(group.reference), _listed(group.candidate)
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


def _listed(units: Sequence[Unit]) -> str:
    named = [f'"{name}" {unit.shapes[kind]}' for unit in units for kind, name in unit.parameters.items()]
    return ", ".join(named)


# Propose a weight map for two modules: by names and shapes, and where these do not tell, by running both.


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
        keep: whether the entries that the pair's ``weights`` has are to stay.
        max_runs: how many alternatives are run at most; twice as many if none of the usual ones fits.
        ranks: over which ranks the candidate is computed, such as ``dict(tp=2)`` or several of these; None for those
            that the pair is declared with.
        progress: called whenever a map has been run, with how many were run so far and how many there may be.

    Raises:
        UserError: if the pair cannot be built, or an entry that is to stay does not fit the modules.
        parity.te.BackendUnavailable: if the backend cannot be had on this machine.
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
        suggestion = Suggestion(_map(kept, open_choices, (0,) * len(open_choices)), problems=tuple(problems))
    else:
        with usual_modes():
            suggestion = _settled(built, chosen, seed, kernels, kept, open_choices, max_runs, progress)
    hints = () if suggestion.fits else tuple(hints_at_norms(suggestion.weights, reference, candidate))
    ordered = _in_order(suggestion.weights, list(shapes.candidate))
    written = collapsed(ordered, shapes.reference, shapes.candidate)
    suggestion = replace(suggestion, weights=ordered, written=written, hints=hints)
    if not case.ranks:
        return suggestion
    parts, unknown = divided(case, chosen, case.ranks, suggestion.weights, shapes)
    return replace(suggestion, divided=parts, problems=(*suggestion.problems, *unknown))


def _open_choices(pair: Pair, shapes: Shapes, kept: WeightMap) -> tuple[list[Choice], list[str]]:
    """Return what there is to choose for the parameters that no kept entry names, and which of them have no place."""
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


def _settled(
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
        settled, usual = _search(trial, kept, found, max_runs, progress)
    except UserError as error:
        return Suggestion(
            _map(kept, found, likeliest),
            tuple(_decisions(found, likeliest, None)),
            (f"the modules could not be run, so this map is based only on names and shapes: {error}",),
        )
    return Suggestion(
        _map(kept, usual, settled.picks),
        tuple(_decisions(usual, settled.picks, settled)),
        error=settled.error,
        expected=trial.expected,
        limit=trial.limit,
        runs=settled.runs,
    )


def _search(
    trial: Trial,
    kept: WeightMap,
    found: Sequence[Choice],
    max_runs: int,
    progress: Callable[[int, int], object],
) -> tuple[Settled, Sequence[Choice]]:
    """Return where the search ended, and the choices that it was about."""
    usual = [choice.usual() for choice in found]
    runs = 0

    def search(among: Sequence[Choice]) -> Settled:
        counts = [len(choice.layouts) for choice in among]
        least = min(max_runs, 1 + sum(count - 1 for count in counts))  # more are run only if none of these fits

        def error(picks: Picks) -> float:
            nonlocal runs
            found = trial.error(_map(kept, among, picks))
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


def _map(kept: WeightMap, found: Sequence[Choice], picks: Picks) -> WeightMap:
    picked = (choice.layouts[pick].entries for choice, pick in zip(found, picks, strict=True))
    return {**kept, **dict(chain.from_iterable(picked))}


def _in_order(weight_map: WeightMap, candidate: Sequence[str]) -> WeightMap:
    """Return the entries in the order in which the candidate declares its parameters."""
    return dict(sorted(weight_map.items(), key=lambda entry: candidate.index(next(names(entry[1])))))


def _decisions(found: Sequence[Choice], picks: Picks, settled: Settled | None) -> Iterator[Decision]:
    for i, choice in enumerate(found):
        if len(choice.layouts) == 1:
            continue
        entries = [choice.first(layout) for layout in choice.layouts]
        shared = set(entries[0]).intersection(*entries[1:])
        errors = settled.alternatives[i] if settled else [float("nan")] * len(entries)
        alternatives = [
            Alternative(_without(own, shared), error, pick == picks[i])
            for pick, (own, error) in enumerate(zip(entries, errors, strict=True))
        ]
        alternatives.sort(key=lambda alternative: (not alternative.chosen, alternative.error))
        yield Decision(choice.about, tuple(alternatives), choice.repeats)


def _without(entries: Entries, shared: set[tuple[Side, Side]]) -> Entries:
    return tuple(entry for entry in entries if entry not in shared)
