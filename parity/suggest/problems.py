"""What has no place in a suggested map, and what is probably wrong with the modules: a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parity.case import Pair
from parity.suggest.matching import Group, Matching
from parity.suggest.names import is_norm
from parity.suggest.units import BIAS, Unit
from parity.weights.alike import Problem, lines
from parity.weights.notation import WeightMap
from parity.weights.other_names import Parameters, other_names
from parity.weights.sides import names
from parity.weights.terms import Constant
from parity.weights.ties import UNTIED, tied_elsewhere
from parity.weights.transfer import parameter_shapes
from parity.weights.unused import norm_without_bias


def parameters_of(pair: Pair) -> tuple[Parameters, Parameters]:
    """What a map may name of the reference and of the candidate."""
    reference, candidate = (
        Parameters(kind, parameter_shapes(module), other_names(module))
        for kind, module in (("reference", pair.reference), ("TE", pair.candidate))
    )
    return reference, candidate


def of_one_name(matching: Matching) -> Iterator[Group]:
    """Units of one name that were not put together, since their shapes do not go together."""
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
    """What has no place in the map, that of layers that are alike together.

    Args:
        misfits: groups that no layout fits.
        reference_left: units with those parameters that no alternative has.
        candidate_left: ditto.
        parameters: of both modules.
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
    """That TE's LayerNorm may have to be an RMSNorm, where a constant stands for its bias."""
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
    text = f'the reference\'s "{name}" {shape} has no place in the TE module'
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
